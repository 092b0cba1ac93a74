/* A model as a graph: ops that read and make values. Delays and combine styles are edges of the
 * graph: graph.c reads them, and no other file does. plan.h levels the graph into stages. */
#ifndef CFLOW_GRAPH_H
#define CFLOW_GRAPH_H

#include "weights.h"

#define NO_VALUE UINT32_MAX

/* What a step computes: `per_row` vectors of `width` floats for each row. */
typedef struct {
    char name[32]; /* "L3.norm1" */
    uint32_t width;
    uint32_t per_row;   /* 1, or top_k: a vector for each expert that a row chose */
    int quantized;      /* 1: also kept as int8 codes, for the matrix that reads it */
    uint32_t n_experts; /* not 0: the rows of each expert (groups in ctx.h) instead of floats */
    uint32_t slot;      /* its buffer; this and the next line are the plan's */
    uint32_t first_stage, last_stage; /* the stages in which it is alive, both included */
} value;

typedef enum {
    OP_COMBINE,      /* stream = base + scaled terms; then the norms that read the stream */
    OP_MATMUL,       /* y_i = W_i x (+ bias_i), for matrices that share x */
    OP_GATED,        /* hidden = act(gate x) * (up x) */
    OP_KV,           /* norms and rotates q and k, stores k and v */
    OP_ATTEND,       /* softmax(q K) V over a row's positions */
    OP_SELECT,       /* top-k of the router's logits, and the rows of each expert */
    OP_EXPERT_GATED, /* OP_GATED for each expert that a row chose */
    OP_EXPERT_DOWN,  /* the experts' down products */
    OP_SPECULATE     /* applies a layer's router one layer early, and has its choices read */
} op_kind;

/* What `in` and `out` of an op mean. OP_COMBINE and OP_MATMUL make further values: norms, sums,
 * pieces.
 *
 *     kind             in                           out
 *     OP_COMBINE       -                            stream
 *     OP_MATMUL        x                            -
 *     OP_GATED         x                            hidden
 *     OP_KV            q, k, v                      rotated q
 *     OP_ATTEND        rotated q                    attention
 *     OP_SELECT        router logits                see below
 *     OP_EXPERT_GATED  x, groups                    hidden
 *     OP_EXPERT_DOWN   hidden, groups               what each expert yields
 *     OP_SPECULATE     router logits                - */
enum { N_IN = 4, N_OUT = 5 };
enum { SELECT_IDS, SELECT_WEIGHTS, SELECT_GROUPS, SELECT_LATE_WEIGHTS, SELECT_LATE_GROUPS };

typedef struct {        /* one matrix of OP_MATMUL */
    const matrix *w;    /* (n_rows, n_cols) */
    const matrix *bias; /* vector (n_rows,), or NULL */
    uint32_t out;
} piece;

typedef struct {
    const matrix *weight; /* vector; NULL: none, the input as it is */
    const matrix *bias;   /* vector, or NULL */
    cflow_norm_kind kind;
    float eps, offset;
} norm_weights;

typedef struct { /* what OP_COMBINE adds: scale * norm(value) */
    uint32_t value;
    float scale;
    norm_weights norm;
    uint32_t weights; /* NO_VALUE, or the weight of each of the value's per_row vectors, which are
                         summed by rank */
    uint32_t sum;     /* the sum or the normed vector that is added; NO_VALUE: value itself */
    uint32_t gate;    /* NO_VALUE, or scale is multiplied by sigmoid(first float of this value) */
} term;

typedef struct { /* a norm of the stream that OP_COMBINE makes */
    norm_weights weights;
    uint32_t out;
} norm;

typedef struct {             /* the matrices of OP_GATED, and their biases or NULL */
    const matrix *gate, *up; /* no gate: hidden = act(up x) */
    const matrix *gate_bias, *up_bias;
} gated_weights;

/* Which term of the closed form an op's bytes belong to. The critical path leaves routers out. */
typedef enum {
    PART_STREAM,
    PART_ATTENTION,
    PART_DENSE,
    PART_EXPERTS,
    PART_ROUTER,
    N_PARTS
} op_part;

enum { MAX_PIECES = 4, MAX_NORMS = 4 };

typedef struct {
    op_kind kind;
    op_part part;
    char name[32];  /* "L3.gate_up" */
    int32_t layer;  /* n_layers: after the layers */
    uint32_t stage; /* the plan's */
    uint64_t bytes; /* weight bytes that one row reads */
    uint32_t in[N_IN];
    uint32_t out[N_OUT];
    piece pieces[MAX_PIECES]; /* OP_MATMUL */
    uint32_t n_pieces;
    gated_weights gated; /* OP_GATED */
    uint32_t lands;      /* OP_EXPERT_GATED: the layer whose output the experts join */
    uint32_t base;       /* OP_COMBINE: the stream it continues; NO_VALUE: the embedding */
    term *terms;         /* OP_COMBINE: in the order of addition */
    uint32_t n_terms;
    norm norms[MAX_NORMS]; /* OP_COMBINE */
    uint32_t n_norms;
    int is_routed;                    /* OP_COMBINE: 1 if a router reads it */
    uint32_t first_demand, n_demands; /* OP_SELECT: in the plan's demands */
} op;

typedef struct {
    op *ops; /* every op after the ops that make its inputs */
    uint32_t n_ops;
    value *values;
    uint32_t n_values;
    term *terms;         /* of all ops */
    uint32_t *made_by;   /* (n_values,) the op that makes each value */
    uint32_t final_norm; /* the value that the head reads */
} graph;

typedef struct {
    int speculate;       /* 1: experts of the next layer are speculated on and read ahead */
    uint32_t defer;      /* experts of a token that join the stream one layer late */
    cflow_window window; /* when their records are demanded */
} graph_options;

/* Builds the graph, which points into the matrices of m. 0: no memory. graph_close in any case. */
int graph_build(graph *g, const model_weights *m, graph_options options);
void graph_close(graph *g);

/* What an op reads: values by index, NO_VALUE among them. */
uint32_t op_n_inputs(const op *o);
uint32_t op_input(const op *o, uint32_t i);
/* What it makes. */
uint32_t op_n_outputs(const op *o);
uint32_t op_output(const op *o, uint32_t i);

#endif
