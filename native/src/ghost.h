/* What larger caches would have had: least-recently-used lists of records without their bytes. The
 * least recently used record gives way in every one of them, so a larger list holds all that a
 * smaller one holds, and one order of use serves both. */
#ifndef CFLOW_GHOST_H
#define CFLOW_GHOST_H

#include <stdint.h>

typedef struct {
    uint32_t before, after;
    int list; /* of `lists`, or -1 */
} ghost_link;

typedef struct {
    uint32_t first, last, n;
} ghost_list;

typedef struct {
    ghost_link *links;   /* (n_records,) */
    ghost_list lists[2]; /* the latest `most` in use, and the `most` before them */
    uint32_t most;       /* 2 n_slots */
} ghost;

/* 0 where there is no memory. */
int ghost_open(ghost *g, uint32_t n_records, uint32_t n_slots);
void ghost_close(ghost *g);
/* The record is used now. Returns 2 if 2 n_slots would have held it, 4 if 4 n_slots, or 0. */
int ghost_use(ghost *g, uint32_t record);

#endif
