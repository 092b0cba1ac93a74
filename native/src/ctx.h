/* A context: the buffers of a plan, the KV blocks, the threads, and the running step. ctx_open.c
 * lays it out; the ops read and write it. */
#ifndef CFLOW_CTX_H
#define CFLOW_CTX_H

#include <stdatomic.h>

#include "arena.h"
#include "kernels.h"
#include "model.h"
#include "plan.h"
#include "pool.h"
#include "weights.h"

enum {
    SCORE_ROWS = 32, /* rows whose logits are held at once for scoring */
    UNIT_BITS = 24   /* bits that count the units of a phase */
};

typedef struct {          /* an expert that some row chose, in one layer */
    uint32_t record;      /* in model->records */
    uint32_t first, n;    /* its rows and outputs in groups */
    const uint8_t *bytes; /* of its record, once it has come */
    int is_missed;
} active_expert;

/* Which rows chose which expert, for one layer. Output row * top_k + rank is that of the row's
 * expert of that rank. The experts are in the order in which they run: those before n_done are
 * done, before n_gated in OP_EXPERT_DOWN, before n_ready in OP_EXPERT_GATED; the others wait for
 * their records. */
typedef struct {
    active_expert *experts; /* (n_active,) */
    uint32_t n_done, n_gated, n_ready, n_active;
    int is_demanded;
    int32_t *rows;    /* (chosen,) by expert, then by row */
    int32_t *outputs; /* (chosen,) */
    float *weights;   /* by row and rank: 0 where the record could not be read */
    size_t weights_ld;
} groups;

/* A value's memory: (max_rows * per_row, ld). Columns past the width are zero in what a matrix
 * multiplies; of other values those up to a multiple of 32 may hold anything. */
typedef struct {
    float *f;
    int8_t *q;    /* and the next two: NULL unless quantized */
    float *scale; /* (.., ld / 32) */
    int32_t *sum; /* (.., ld / 16) */
    size_t ld;
    groups *groups; /* for routing lists; then the rest is NULL */
} buffer;

typedef struct { /* why a row failed: its layer, the record, TIER_OK where it did not */
    int32_t layer;
    uint32_t record; /* an expert's; NO_RECORD: the layer's own */
    tier_result result;
} row_fault;

typedef struct { /* what a unit of OP_ATTEND has of a row: a part, or with n_parts 1 all of it */
    uint32_t row, part, n_parts;
} row_part;

typedef struct {
    const cflow_row *rows;
    uint32_t n_rows;
    uint32_t n_row_parts;
    int32_t *row_status;
    cflow_score *scores;
    int32_t *logit_rows; /* (n_logits,) rows that keep their logits */
    int32_t *score_rows; /* (n_scores,) */
    uint32_t n_logits, n_scores;
    uint64_t attended; /* positions all rows look at together */
    uint32_t n_phases;
    atomic_uint phase;      /* the one running; n_phases: none */
    atomic_uint units_done; /* of the running phase */
    uint32_t n_units;
    atomic_uint grain; /* units that a thread takes at a time, or a multiple */
    uint64_t began_ns; /* the running phase; 0: none runs */
    int cancelled;
} step;

/* What is left of a thread's share of the running phase: units [next, end) under the phase's turn.
 */
typedef struct {
    _Alignas(64) atomic_uint_fast64_t left;
} share;

typedef struct {
    atomic_uint_fast64_t ns, idle_ns;
} stage_time;

struct cflow_ctx {
    cflow_model *model;
    const model_weights *weights; /* these four: the model's */
    const plan *plan;
    tier *tier;
    ring *ring;
    cflow_ctx_options options;
    kernels k;
    pool *pool;
    arena memory;
    buffer *buffers; /* (n_slots,), or (n_values,) with keep_values */
    uint8_t *kv;     /* (n_kv_blocks, block_bytes) */
    size_t block_bytes;
    size_t *layer_offset; /* (n_layers,) in a block */
    size_t *head_bytes;   /* (n_layers,) of one KV head in a block */
    int32_t *tables;      /* (max_sequences, max_blocks) */
    int32_t *table_size;  /* (max_sequences,) */
    int32_t max_blocks;   /* of one sequence */
    const float **rope; /* (n_layers,) (max_context, rope_dim) cosines, then sines, of a position */
    float *logits;      /* (max_sequences, vocab_ld) */
    float *score_logits; /* (SCORE_ROWS, vocab_ld) */
    size_t vocab_ld;
    int32_t *logit_of_row;   /* (max_rows,) row of logits, -1: none */
    row_part *row_parts;     /* (max_rows or attend_cuts,) the parts of a row in their order */
    float *partials;         /* (attend_cuts, KV heads, ..) */
    atomic_uint *parts_done; /* (attend_cuts, KV heads) at a row's first part; 0 between phases */
    uint32_t *wanted;        /* where experts are on disk: what a wave waits for */
    cflow_row_usage *usage;  /* (max_rows,) and the next where any weights are on disk */
    row_fault *faults;       /* (max_rows,) */
    uint8_t *scratch;        /* (n_threads, scratch_bytes) */
    size_t scratch_bytes;
    share *shares;     /* (n_threads,) */
    stage_time *times; /* (n_stages + 2,) */
    step step;
    atomic_int cancelled;
    atomic_uint_fast64_t stage_count, read_bytes;
};

static inline buffer *ctx_buffer(const cflow_ctx *ctx, uint32_t v) {
    return &ctx->buffers[ctx->options.keep_values ? v : ctx->plan->values[v].slot];
}
/* Whom an expert op's experts are for. */
static inline groups *op_groups(const cflow_ctx *ctx, const op *o) {
    return ctx_buffer(ctx, o->in[1])->groups;
}
static inline void *ctx_scratch(const cflow_ctx *ctx, int thread) {
    return ctx->scratch + (size_t)thread * ctx->scratch_bytes;
}
static inline activations buffer_activations(const buffer *b) {
    return (activations){.f = b->f, .q = b->q, .scale = b->scale, .sum = b->sum, .ld = b->ld};
}

#endif
