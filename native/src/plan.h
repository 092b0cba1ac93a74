/* A plan: the graph of a model levelled into stages. The ops of a stage are independent and run
 * together between two barriers. */
#ifndef CFLOW_PLAN_H
#define CFLOW_PLAN_H

#include "graph.h"

/* A buffer, shared by values of one shape that are never alive in the same stage. */
typedef struct {
    uint32_t width, per_row, n_experts;
    int quantized;
    uint32_t free_after; /* the last stage of its latest value */
} slot;

static inline slot slot_for(const value *v) {
    return (slot){.width = v->width,
                  .per_row = v->per_row,
                  .n_experts = v->n_experts,
                  .quantized = v->quantized,
                  .free_after = v->last_stage};
}

typedef struct {
    op *ops; /* by stage; in a stage routers and selections come first, as reads wait for them */
    uint32_t n_ops;
    uint32_t *first_op; /* (n_stages + 1,) */
    uint32_t n_stages;
    value *values;
    uint32_t n_values;
    term *terms; /* of all ops */
    slot *slots;
    uint32_t n_slots;
    uint32_t final_norm; /* the value that the head reads */
    uint32_t defer;      /* as in graph_options */
    uint32_t *demands;   /* groups whose records each OP_SELECT demands: all that it chose, unless
                            graph_options.window says otherwise */
    int is_synchronous;  /* 1: records are demanded when they are to run, and the step waits */
    cflow_plan_info info;
} plan;

/* ENOMEM. The plan points into the matrices of m, which must outlive it. */
cflow_status plan_open(plan **out, const model_weights *m, graph_options options, cflow_error *err);
void plan_close(plan *p);

/* Describes op `index`. EINVAL if there is none. */
cflow_status plan_describe(const plan *p, uint32_t index, cflow_op_info *out, cflow_error *err);

/* A step runs in phases. Phase 2s runs the ops of stage s. Phase 2s + 1 repeats while experts of
 * stage s wait for their records: it runs OP_EXPERT_DOWN, of the stage after, for the experts that
 * the last phase gated, and OP_EXPERT_GATED for those that have arrived since. The head's phases
 * follow.
 *
 * The ops of a phase are those in [*first, *end) for which phase_has is 1. */
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
