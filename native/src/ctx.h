/* A context: the buffers of a plan, the KV blocks, the threads, and the step that is running. */
#ifndef CFLOW_CTX_H
#define CFLOW_CTX_H

#include <stdatomic.h>

#include "arena.h"
#include "kernels.h"
#include "plan.h"
#include "pool.h"

enum {
    UNIT = 32, /* outputs of the smallest piece of work on a matrix: one block of activations */
    STRIPE_UNITS = 4,   /* most units of a stripe */
    GATED_ROWS = 64,    /* rows whose gate and up outputs a thread holds at once */
    SCORE_ROWS = 32,    /* rows whose logits are held at once for scoring */
    ATTEND_PART = 1024, /* positions, a multiple of a KV block: the floats depend on it */
    CUT_UNITS = 4,      /* a thread's units of attention, below which rows are cut into parts */
    UNIT_BITS = 24      /* a phase has fewer units than this many bits count */
};

typedef struct {          /* an expert that some row chose, in one layer */
    uint32_t record;      /* in model->records */
    uint32_t first, n;    /* its rows and slots in groups */
    const uint8_t *bytes; /* of its record, once it has come */
    int is_missed;
} active_expert;

/* Which rows chose which expert, for one layer. Slot row * top_k + rank holds what that choice
 * yields. The experts lie in the order in which they run: those up to n_done are through, up to
 * n_gated they are in OP_EXPERT_DOWN, up to n_ready in OP_EXPERT_GATED, the others wait for their
 * records. */
typedef struct {
    active_expert *experts; /* (n_active,) */
    uint32_t n_done, n_gated, n_ready, n_active;
    int is_demanded;
    int32_t *rows;  /* (chosen,) by expert, then by row */
    int32_t *slots; /* (chosen,) */
    float *weights; /* by row and rank: 0 where the record could not be read */
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
    const cflow_model *model;
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
    return &ctx->buffers[ctx->options.keep_values ? v : ctx->model->plan->values[v].slot];
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
static inline uint32_t stripe_units(const matrix *w) {
    return w->stripe_rows / UNIT;
}
static inline uint32_t matrix_units(const matrix *w) {
    return w->n_stripes * stripe_units(w);
}
static inline uint64_t matrix_unit_bytes(const matrix *w) {
    return w->stripe_bytes / stripe_units(w);
}

/* y = W x for units [first, end) of w and m rows; y's column 0 is the first output of unit `first`.
 */
void multiply(const cflow_ctx *ctx, const matrix *w, uint32_t first, uint32_t end, activations x,
              const int32_t *x_rows, uint32_t m, const int32_t *y_rows, float *y, size_t y_ld);
/* hidden = act(gate x) * (up x), units [first, end); quantised where the buffer is. */
void multiply_gated(const cflow_ctx *ctx, const cflow_layer *l, const matrix *gate,
                    const matrix *up, uint32_t first, uint32_t end, activations x,
                    const int32_t *x_rows, uint32_t m, const int32_t *y_rows, const buffer *hidden,
                    int thread);
/* Columns [column, column + n) of a row of b are written: zeroes what follows up to a multiple of
 * 32, as what multiplies them reads it, and makes their codes if b has any. */
void buffer_finish(const cflow_ctx *ctx, const buffer *b, size_t row, size_t column, uint32_t n);

/* A span is a run of equal units of one op; these are what forward.c splits over the threads. */
typedef struct {
    uint32_t units;
    uint64_t cost;   /* of a unit, in weight bytes times rows */
    uint32_t stripe; /* units of one; 0: they lie in none */
} span;

static inline span matrix_span(const matrix *w, uint64_t cost) {
    return (span){matrix_units(w), cost, stripe_units(w)};
}

/* Units [first, end) of an op's work; of one piece, expert or phase where there are several. */
void matmul_run(const cflow_ctx *ctx, const op *o, const piece *one, uint32_t first, uint32_t end);
void gated_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread);
void combine_row(const cflow_ctx *ctx, const op *o, uint32_t row);
span kv_span(const cflow_ctx *ctx, const op *o);
void kv_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread);
span attend_span(const cflow_ctx *ctx, const op *o);
void attend_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread);
size_t attend_scratch(const cflow_model *model);
/* Which rows of this step are cut, and into what. */
void attend_divide(cflow_ctx *ctx);
/* The most parts that a step's rows are cut into, and what is kept of one. */
uint64_t attend_cuts(const cflow_model *model, const cflow_ctx_options *options);
size_t attend_partial_bytes(const cflow_model *model);
void select_run(cflow_ctx *ctx, const op *o, int thread);
void guess_run(cflow_ctx *ctx, const op *o, int thread);
/* index: of the experts that are in the op now. */
uint32_t expert_spans(const cflow_ctx *ctx, const op *o);
span expert_span(const cflow_ctx *ctx, const op *o, uint32_t index);
void expert_run(const cflow_ctx *ctx, const op *o, uint32_t index, uint32_t first, uint32_t end,
                int thread);

/* The phases of a step: stage s is phase 2 s; phase 2 s + 1 runs as often as experts of stage s are
 * still on their way: OP_EXPERT_DOWN of those that were in the phase before, OP_EXPERT_GATED of
 * those that have come since. Then the head. The ops of a phase are those of [*first, *end) that
 * phase_has. */
static inline void phase_ops(const plan *p, uint32_t phase, uint32_t *first, uint32_t *end) {
    const uint32_t stage = phase / 2, after = stage + 1 + phase % 2;
    *first = p->first_op[stage];
    *end = p->first_op[after < p->n_stages ? after : p->n_stages];
}
static inline int phase_has(const op *o, uint32_t phase) {
    if (phase % 2 == 0) return 1;
    return o->kind == (o->stage == phase / 2 ? OP_EXPERT_GATED : OP_EXPERT_DOWN);
}

/* waves.c, by one thread, but for the first between two phases. Where experts are on disk, those
 * whose records are there, pinned, run as a wave. A phase with any other work does not wait for
 * records. */

/* Has experts read, after OP_SELECT. scratch: 5 bytes for each of a layer. */
void waves_selected(cflow_ctx *ctx, const op *select, void *scratch);
/* 1 if the phase may have work. */
int waves_begin(cflow_ctx *ctx, uint32_t phase);
/* Waits for one more expert of the phase; 0 if there is none to wait for. */
int waves_wait(cflow_ctx *ctx, uint32_t phase);
/* The phase is over: unpins. The next one. */
uint32_t waves_end(cflow_ctx *ctx, uint32_t phase);
/* The step ends before `phase`: unpins and withdraws everything. */
void waves_abandon(cflow_ctx *ctx, uint32_t phase);

/* ring.c, by one thread between two phases, where the weights of layers are on disk. */

/* Waits for what the phase reads and pins it. 0: cancelled, or all rows have failed. */
int ring_begin(cflow_ctx *ctx, uint32_t phase);
/* The phase is over: unpins what no later one reads, and has the next records read. */
void ring_end(cflow_ctx *ctx, uint32_t phase);
/* The step ended early: unpins and withdraws everything. */
void ring_abandon(cflow_ctx *ctx);

const matrix *head_matrix(const cflow_model *m);
/* The score of a row that has none. */
cflow_score no_score(void);
/* Phases of this step's head, and one of them. */
uint32_t head_phases(const cflow_ctx *ctx);
span head_span(const cflow_ctx *ctx, uint32_t phase);
void head_phase(cflow_ctx *ctx, uint32_t phase, uint32_t first, uint32_t end);

/* Fills (context, rope_dim): rope_dim / 2 cosines then as many sines for each position. */
void rope_table(const cflow_layer *l, uint32_t context, float *table);
/* Bytes of one KV head of a layer in a block, a multiple of 64. */
size_t kv_head_bytes(const cflow_layer *l, int32_t kv_type);

#endif
