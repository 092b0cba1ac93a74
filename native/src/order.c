/* The order in which a step reads the tensors, taken from the plan. Files in stage order store
 * their tensors that way. */
#include "model.h"
#include "tensors.h"

typedef struct {
    const model_weights *m;
    uint32_t *tensors; /* (n,) indices without repeats */
    uint32_t n;
} reading;

/* Appends the tensor of matrix w. Ignores a w that is NULL or not in the file. */
static void append(reading *r, const matrix *w) {
    const uint32_t t = tensor_of(r->m, w);
    if (t == r->m->header.n_tensors) return;
    for (uint32_t i = 0; i < r->n; i++)
        if (r->tensors[i] == t) return;
    r->tensors[r->n++] = t;
}

static void append_role(reading *r, const op *o, cflow_role role) {
    append(r, model_matrix(r->m, (uint32_t)o->layer, role));
}

static void append_op(reading *r, const op *o) {
    switch (o->kind) {
    case OP_COMBINE:
        if (o->base == NO_VALUE && !r->m->header.tied) append(r, &r->m->global[CFLOW_EMBEDDING]);
        for (uint32_t i = 0; i < o->n_terms; i++) append(r, o->terms[i].norm.weight);
        for (uint32_t i = 0; i < o->n_norms; i++) {
            append(r, o->norms[i].weights.weight);
            append(r, o->norms[i].weights.bias);
        }
        break;
    case OP_MATMUL:
        for (uint32_t i = 0; i < o->n_pieces; i++) append(r, o->pieces[i].w);
        for (uint32_t i = 0; i < o->n_pieces; i++) append(r, o->pieces[i].bias);
        break;
    case OP_GATED:
        append(r, o->gated.gate);
        append(r, o->gated.gate_bias);
        append(r, o->gated.up);
        append(r, o->gated.up_bias);
        break;
    case OP_KV:
        append_role(r, o, CFLOW_Q_NORM);
        append_role(r, o, CFLOW_K_NORM);
        append_role(r, o, CFLOW_ROPE_DIVISORS);
        append_role(r, o, CFLOW_ROPE_DIVISORS_LONG);
        break;
    case OP_EXPERT_GATED:
        append_role(r, o, CFLOW_EXPERT_GATE);
        append_role(r, o, CFLOW_EXPERT_UP);
        break;
    case OP_EXPERT_DOWN:
        append_role(r, o, CFLOW_EXPERT_DOWN);
        break;
    case OP_ATTEND:
    case OP_SELECT:
    case OP_SPECULATE:
        break;
    }
}

void cflow_model_reading_order(const cflow_model *model, uint32_t *tensors) {
    reading r = {.m = &model->weights, .tensors = tensors};
    const plan *p = model->plan;
    for (uint32_t i = 0; i < p->n_ops; i++) append_op(&r, &p->ops[i]);
    append(&r, head_matrix(r.m));
}
