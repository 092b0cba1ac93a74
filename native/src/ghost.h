/* What larger caches would have had: least-recently-used lists of records without their bytes. The
 * least recently used record gives way in every one of them, so a larger list holds all that a
 * smaller one holds, and one order of use serves both. */
#ifndef CFLOW_GHOST_H
#define CFLOW_GHOST_H

#include "list.h"

typedef struct {      /* stays where it was opened */
    list_link *links; /* (n_records,) */
    list lists[2];    /* the latest `most` in use, and the `most` before them */
    uint32_t most;    /* 2 n_slots */
} ghost;

/* 0 where there is no memory. */
int ghost_open(ghost *g, uint32_t n_records, uint32_t n_slots);
void ghost_close(ghost *g);
/* The record is used now. Returns 2 if 2 n_slots would have held it, 4 if 4 n_slots, or 0. */
int ghost_use(ghost *g, uint32_t record);

#endif
