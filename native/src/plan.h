/* A model is a graph of ops over values; its plan is the graph levelled into stages. The ops of a
 * stage are independent and run together between two barriers. Delays and combine styles are edges
 * of the graph: they are read here and nowhere else. */
#ifndef CFLOW_PLAN_H
#define CFLOW_PLAN_H

#include "weights.h"

/* What a step computes: a buffer of `width` floats per row, or `per_row` of them. */
typedef struct {
    char name[32]; /* "L3.norm1" */
    uint32_t width;
    uint32_t per_row;   /* 1; top_k for what every routed expert of a row has */
    int quantized;      /* also kept as int8 codes, for a matmul to read */
    uint32_t n_experts; /* not 0: which rows chose which expert (groups in ctx.h), not floats */
    uint32_t slot;      /* which buffer */
    uint32_t first_stage, last_stage; /* alive in these, both included */
} value;

/* Values of one shape whose lives do not overlap share a slot. */
typedef struct {
    uint32_t width, per_row, n_experts;
    int quantized;
    uint32_t free_after; /* the last stage of its latest tenant */
} slot;

#define NO_VALUE UINT32_MAX

typedef enum {
    OP_COMBINE, /* stream = base + scaled terms, then every norm that reads it */
    OP_MATMUL,  /* y_i = W_i x (+ bias_i) for matrices that share their input */
    OP_GATED,   /* hidden = act(gate x) * (up x) */
    OP_KV,      /* norms and rotates q and k, stores k and v */
    OP_ATTEND,
    OP_SELECT,       /* top-k of the router's logits; which rows want which expert */
    OP_EXPERT_GATED, /* OP_GATED of every expert some row chose */
    OP_EXPERT_DOWN,
    OP_GUESS /* reads ahead what a layer's router makes of the stream of the layer before */
} op_kind;

typedef struct { /* one matrix of OP_MATMUL */
    const matrix *w;
    const matrix *bias; /* vector (n_rows,), or NULL */
    uint32_t out;
} piece;

typedef struct { /* what OP_COMBINE adds, in order */
    uint32_t value;
    float scale;
    uint32_t weights; /* per_row > 1: multiplied by these and summed into `sum` by rank first */
    uint32_t sum;
    uint32_t gate; /* or NO_VALUE: multiplied by sigmoid of this value's first float */
} term;

typedef struct {          /* a norm of the stream OP_COMBINE makes */
    const matrix *weight; /* vector */
    float eps, offset;
    uint32_t out;
} norm;

/* Whose bytes they are in the closed form; the critical path leaves routers out. */
typedef enum {
    PART_STREAM,
    PART_ATTENTION,
    PART_DENSE,
    PART_EXPERTS,
    PART_ROUTER,
    N_PARTS
} op_part;

#define MAX_PIECES 4
#define MAX_NORMS 4

typedef struct {
    op_kind kind;
    op_part part;
    char name[32]; /* "L3.gate_up" */
    int32_t layer; /* n_layers: after them */
    uint32_t stage;
    uint64_t bytes; /* weights one row makes it read */
    uint32_t in[4]; /* kind by kind, see build_* in plan.c; NO_VALUE where unused */
    uint32_t out[5];
    piece pieces[MAX_PIECES];
    uint32_t n_pieces;
    const matrix *gate, *up; /* OP_GATED */
    uint32_t lands;          /* OP_EXPERT_GATED: the layer whose combine adds what comes of it */
    uint32_t base;           /* OP_COMBINE: the stream it continues; NO_VALUE: the embedding */
    term *terms;
    uint32_t n_terms;
    norm norms[MAX_NORMS];
    uint32_t n_norms;
    int is_routed; /* OP_COMBINE: a router reads it */
} op;

typedef struct {
    op *ops; /* in stage order; in a stage routers and selections first */
    uint32_t n_ops;
    uint32_t *first_op; /* (n_stages + 1,) */
    uint32_t n_stages;
    value *values;
    uint32_t n_values;
    term *terms; /* of all ops */
    slot *slots;
    uint32_t n_slots;
    uint32_t final_norm; /* the value the head reads */
    uint32_t defer;      /* of plan_options */
    cflow_plan_info info;
} plan;

typedef struct {
    int speculate;  /* 1: guess the next layer's experts and read them ahead */
    uint32_t defer; /* experts of a token that join the stream one layer late */
} plan_options;

/* ENOMEM. The plan points into the matrices of m, which must outlive it. */
cflow_status plan_open(plan **out, const model_weights *m, plan_options options, cflow_error *err);
void plan_close(plan *p);

/* Describes op `index`. EINVAL if there is none. */
cflow_status plan_describe(const plan *p, uint32_t index, cflow_op_info *out, cflow_error *err);

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

#endif
