/* Ghost caches: which demands larger caches would have held, from lists of records without bytes.
 * Each evicts the least recently used record, so a larger cache holds all that a smaller one holds,
 * and one order of use serves both. */
#ifndef CFLOW_GHOST_H
#define CFLOW_GHOST_H

#include "list.h"

typedef struct {      /* must not be moved while it is open */
    list_link *links; /* (n_records,) */
    list lists[2];    /* the `most` latest used records, and the `most` before these */
    uint32_t most;    /* 2 n_slots */
} ghost;

/* For a cache of n_slots. Returns 0 if an allocation fails. */
int ghost_open(ghost *g, uint32_t n_records, uint32_t n_slots);
void ghost_close(ghost *g);
/* Notes a use of the record. Returns 2 if a cache of 2 n_slots held it until now, 4 if only one of
 * 4 n_slots did, else 0. */
int ghost_use(ghost *g, uint32_t record);

#endif
