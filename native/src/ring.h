/* Layer weights of which only some stay in memory (weights_memory): records of the resident bank
 * that come and go in the order of the plan, the same in every step.
 *
 * The bank is cut where the matrices of a block begin, and at the tensors that belong to no layer.
 * From a block's cut to the next one is a record: in layer order the block, in stage order what a
 * step reads from there on. A record is widened to whole runs, as these have the checksums.
 * Embedding, head and vectors are resident.
 *
 * As the order of use is a cycle, the least recently used record would always be the one that is
 * wanted next. So of the slots all but a ring hold records for good, spread over the layers, so
 * that computing them hides reads; the others pass through the ring, read ahead as soon as a slot
 * is free, also for the next step. The ring has a slot for each record that a stage needs at once
 * and for each read in flight. There is one ring, hence one context to a model. */
#ifndef CFLOW_RING_H
#define CFLOW_RING_H

#include "file.h"
#include "list.h"
#include "model.h"

typedef struct {         /* of the resident bank */
    uint64_t start, end; /* whole runs, but for the bank's end */
    uint32_t block;      /* whose matrices it begins with; CFLOW_MODEL_LEVEL: it stays in memory */
    uint32_t record;
} segment;

typedef struct { /* a record's use by the plan: in stages first to last it is pinned */
    uint32_t record;
    uint32_t pass;  /* how many earlier layers use the block of `layer` */
    uint32_t layer; /* that reads it first */
    uint32_t first, last;
    int is_missed; /* demanded while it was not there */
    int is_pinned;
} layer_use;

struct ring {
    segment *segments;
    uint32_t n_segments;
    tier_record *records;
    uint32_t n_records;
    uint32_t *record_of; /* (n_tensors,) NO_RECORD: it stays in memory */
    layer_use *uses;     /* of records that come and go, by their first stage */
    uint32_t n_uses;
    uint64_t slot_bytes;
    uint32_t n_slots, n_passing, n_kept;
    tier *tier;
    uint32_t next; /* use to be demanded next */
    int is_reading;
};

/* Cuts the bank, into m->ring. EINVAL where a tensor lies across a cut. */
cflow_status ring_cut(cflow_model *m, cflow_error *err);
/* Which records stay, and when the others are used; m->plan is there. EINVAL with the numbers where
 * the budget is below the ring. */
cflow_status ring_schedule(cflow_model *m, const cflow_model_options *options, cflow_error *err);
/* Reads what stays. EFORMAT, EIO, ECANCELLED. */
cflow_status ring_load(cflow_model *m, const file *f, const cflow_model_options *options,
                       const tier_hooks *hooks, cflow_error *err);
void ring_close(ring *r);
/* Pins a tensor's matrix where it is now; TIER_OK where it always is. */
tier_result ring_pin(const cflow_model *m, uint32_t tensor);
void ring_unpin(const cflow_model *m, uint32_t tensor);

#endif
