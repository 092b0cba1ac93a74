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
#include "plan.h"
#include "tier.h"
#include "weights.h"

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

typedef struct {
    model_weights *weights; /* whose matrices it moves */
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
} ring;

/* Cuts the bank. EINVAL where a tensor lies across a cut; ENOMEM. *out is to be closed even then.
 */
cflow_status ring_cut(ring **out, model_weights *m, cflow_error *err);
/* Which records stay, and when the others are used. EINVAL with the numbers where the budget is
 * below the ring. */
cflow_status ring_schedule(ring *r, const plan *p, const cflow_model_options *options,
                           cflow_error *err);
/* Reads what stays; options: how, but for the budget. EFORMAT, EIO, ECANCELLED. */
cflow_status ring_load(ring *r, const file *f, const tier_options *options,
                       cflow_progress *progress, cflow_error *err);
void ring_close(ring *r);
/* Waits for a record and pins it; tier_release unpins it. */
tier_result ring_pin(const ring *r, uint32_t record, const atomic_int *cancel);
/* Pins a tensor's matrix where it is now; TIER_OK where it always is, or r is NULL. */
tier_result ring_pin_tensor(const ring *r, uint32_t tensor);
void ring_unpin_tensor(const ring *r, uint32_t tensor);

#endif
