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

typedef struct {          /* an expert that at least one row chose, in one layer */
    uint32_t record;      /* index into the weights' records */
    uint32_t first, n;    /* its part of groups.rows and groups.outputs */
    const uint8_t *bytes; /* its record, while pinned */
    int is_missed;        /* 1: the demand has to read its record from disk */
} active_expert;

/* Which rows chose which expert, for one layer. Output row * top_k + rank is that of the row's
 * expert of that rank. The experts are in the order in which they run: those before n_done are
 * done, before n_gated in OP_EXPERT_DOWN, before n_ready in OP_EXPERT_GATED; the others wait for
 * their records. */
typedef struct {
    active_expert *experts; /* (n_active,) */
    uint32_t n_done, n_gated, n_ready, n_active;
    int is_demanded;   /* 1: the tier has been asked for their records */
    int32_t *rows;     /* (chosen,) by expert, then by row */
    int32_t *outputs;  /* (chosen,) */
    float *weights;    /* (n_rows, top_k); 0 where the record could not be read */
    size_t weights_ld; /* floats from a row of `weights` to the next */
} groups;

/* The memory of a value: rows = max_rows * per_row, each padded to ld columns. If a matrix
 * multiplies the value, its padding is zero; otherwise padding up to a multiple of 32 may hold
 * anything. */
typedef struct {
    float *f;     /* (rows, ld) */
    int8_t *q;    /* (rows, ld) codes; this and the next two are NULL unless quantized */
    float *scale; /* (rows, ld / 32) */
    int32_t *sum; /* (rows, ld / 16) */
    size_t ld;
    groups *groups; /* of a value with n_experts, which has nothing else */
} buffer;

typedef struct { /* why a row failed */
    int32_t layer;
    uint32_t record;    /* of an expert; NO_RECORD: of the layer itself */
    tier_result result; /* TIER_OK: the row has not failed */
} row_fault;

typedef struct { /* part `part` of a row's positions; n_parts 1: all of them */
    uint32_t row, part, n_parts;
} row_part;

typedef struct {
    const cflow_row *rows; /* (n_rows,) */
    uint32_t n_rows;
    uint32_t n_row_parts; /* in ctx->row_parts */
    int32_t *row_status;  /* (n_rows,) */
    cflow_score *scores;  /* (n_scores,) */
    int32_t *logit_rows;  /* (n_logits,) rows that keep their logits */
    int32_t *score_rows;  /* (n_scores,) rows that are scored */
    uint32_t n_logits, n_scores;
    uint64_t attended; /* positions, summed over rows */
    uint32_t n_phases;
    atomic_uint phase;      /* the running phase; n_phases: none */
    atomic_uint units_done; /* of the running phase, and the next two */
    uint32_t n_units;
    atomic_uint grain; /* units; threads take multiples of it */
    uint64_t began_ns; /* when the running phase began; 0: none runs */
    int cancelled;
} step;

/* The units of the running phase that a thread has yet to take, packed by forward.c. */
typedef struct {
    _Alignas(64) atomic_uint_fast64_t left;
} share;

typedef struct {
    atomic_uint_fast64_t ns, idle_ns;
} stage_time;

struct cflow_ctx {
    cflow_model *model;
    const model_weights *weights; /* the model's, as are the next three */
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
    size_t *layer_offset; /* (n_layers,) of a layer in a block, in bytes */
    size_t *head_bytes;   /* (n_layers,) of one KV head in a block */
    int32_t *tables;      /* (max_sequences, max_blocks) blocks of each sequence */
    int32_t *table_size;  /* (max_sequences,) how many it has */
    int32_t max_blocks;   /* of one sequence */
    const float **rope;   /* (n_layers,) tables (max_context, rope_dim): see rope_table */
    float *logits;        /* (max_sequences, vocab_ld) */
    float *score_logits;  /* (SCORE_ROWS, vocab_ld) */
    size_t vocab_ld;
    int32_t *logit_of_row;   /* (max_rows,) row in logits; -1: none */
    row_part *row_parts;     /* (max_rows or attend_cuts,) a row's parts are adjacent, in order */
    float *partials;         /* (attend_cuts, KV heads, floats of a partial): attention.c */
    atomic_uint *parts_done; /* (attend_cuts, KV heads) at a row's first part; 0 between phases */
    uint32_t *wanted;        /* records that a wave waits for; NULL unless experts are on disk */
    cflow_row_usage *usage;  /* (max_rows,) NULL if all weights are in memory, as is the next */
    row_fault *faults;       /* (max_rows,) */
    uint8_t *scratch;        /* (n_threads, scratch_bytes) */
    size_t scratch_bytes;
    share *shares;     /* (n_threads,) */
    stage_time *times; /* (n_stages + 2,) */
    step step;
    atomic_int cancelled;
    atomic_uint_fast64_t stage_count, read_bytes;
};

/* The buffer of value v. */
static inline buffer *ctx_buffer(const cflow_ctx *ctx, uint32_t v) {
    return &ctx->buffers[ctx->options.keep_values ? v : ctx->plan->values[v].slot];
}
/* The experts of an expert op, with their rows. */
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
