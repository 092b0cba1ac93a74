/* The ring: layer weights on disk (weights_memory). Which records of the resident bank stay in RAM,
 * and in which order the others are read, the same in every step.
 *
 * Records. The bank is cut where the matrices of each weight block begin, and at the tensors
 * outside the layers. The bytes from a block's cut to the next cut are a record, widened to whole
 * runs, since each run has a checksum. Embedding, head and vectors are not in records: they stay in
 * RAM.
 *
 * Schedule. Steps use the records in a cycle, so an LRU cache would always evict the record that is
 * needed next. Instead, all slots but n_passing hold records for good (the kept ones, spread evenly
 * over the layers, so that computing with them hides reads). All other records pass through the
 * n_passing slots, the ring: each is read as soon as a slot is free, also for the next step. The
 * ring has a slot for each record that a stage needs at once and for each read in flight.
 *
 * A model has one ring, so it can have one context only. */
#ifndef CFLOW_RING_H
#define CFLOW_RING_H

#include "file.h"
#include "list.h"
#include "plan.h"
#include "tier.h"
#include "weights.h"

typedef struct {         /* bytes [start, end) of the resident bank */
    uint64_t start, end; /* whole runs, except at the bank's end */
    uint32_t block;      /* weight block that begins here; CFLOW_MODEL_LEVEL: it stays in RAM */
    uint32_t record;     /* NO_RECORD: it stays in RAM */
} segment;

typedef struct { /* one use of a record in a step */
    uint32_t record;
    uint32_t pass;        /* how many earlier layers use the same weight block */
    uint32_t layer;       /* the first that reads it in this pass */
    uint32_t first, last; /* stages in which it is pinned */
    int is_missed;        /* 1: its demand caused a read */
    int is_pinned;
} layer_use;

typedef struct {
    model_weights *weights; /* whose matrices it moves */
    segment *segments;
    uint32_t n_segments;
    tier_record *records;
    uint32_t n_records;
    uint32_t *record_of; /* (n_tensors,) NO_RECORD: it stays in RAM */
    layer_use *uses;     /* of the records that pass through, by their first stage */
    uint32_t n_uses;
    uint64_t slot_bytes;
    uint32_t n_slots;   /* records that fit in RAM */
    uint32_t n_passing; /* slots of the ring */
    uint32_t n_kept;    /* records that stay */
    tier *tier;
    uint32_t next;  /* index of the use to be demanded next */
    int is_reading; /* 1: the first n_passing uses of the step are demanded */
} ring;

/* Cuts the bank into records. *out must be closed on errors too: EINVAL if a tensor lies across a
 * cut, ENOMEM. */
cflow_status ring_cut(ring **out, model_weights *m, cflow_error *err);
/* Chooses the records that stay and lists the uses of the others. Errors: EINVAL with the numbers
 * if weights_memory is too small for the ring, ENOMEM. */
cflow_status ring_schedule(ring *r, const plan *p, const cflow_model_options *options,
                           cflow_error *err);
/* Opens the tier and reads the records that stay. options: all but the budget. progress may be
 * NULL. Errors: EFORMAT, EIO, ECANCELLED, ENOMEM. */
cflow_status ring_load(ring *r, const file *f, const tier_options *options,
                       cflow_progress *progress, cflow_error *err);
void ring_close(ring *r);
/* Blocks until a record is in RAM and pins it; tier_release unpins it. */
tier_result ring_pin(const ring *r, uint32_t record, const atomic_int *cancel);
/* The same for the record of a tensor. Does nothing if the tensor is in no record, or r is NULL. */
tier_result ring_pin_tensor(const ring *r, uint32_t tensor);
void ring_unpin_tensor(const ring *r, uint32_t tensor);

#endif
