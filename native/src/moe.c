/* Mixture of experts: choosing, gathering the rows that chose the same, and the experts themselves.
 */
#include <math.h>
#include <string.h>

#include "ctx.h"

/* ---- OP_SELECT ---- */

/* softmax, top k by weight (ties: smaller id), optionally divided by their sum, times expert_scale.
 * Ids and weights by rank; ranks past k have id -1 and weight 0. Logits that are not numbers choose
 * nobody: id -1 and weight NaN, so that the row's own logits show it. */
static void select_row(const cflow_ctx *ctx, const cflow_layer *l, const float *logits, uint32_t k,
                       float *p, float *ids, float *weights) {
    const uint32_t n = l->n_experts;
    const float m = ctx->k.max(logits, n);
    ctx->k.exp_shifted(logits, n, m, p);
    const float sum = ctx->k.sum_exp(logits, n, m);
    float chosen = 0;
    for (uint32_t rank = 0; rank < l->top_k; rank++) {
        ids[rank] = -1;
        weights[rank] = 0;
        if (rank >= k) continue;
        uint32_t best = UINT32_MAX;
        for (uint32_t e = 0; e < n; e++)
            if (p[e] >= 0 && (best == UINT32_MAX || p[e] > p[best])) best = e;
        if (best == UINT32_MAX) {
            weights[rank] = NAN;
            continue;
        }
        ids[rank] = (float)best;
        weights[rank] = p[best] / sum;
        chosen += weights[rank];
        p[best] = -1;
    }
    for (uint32_t rank = 0; rank < k; rank++) {
        if (l->renormalise) weights[rank] = weights[rank] / chosen;
        weights[rank] = weights[rank] * l->expert_scale;
    }
}

/* Counting sort of all (row, rank) by expert. */
static void group_rows(const cflow_ctx *ctx, const cflow_layer *l, const buffer *routed, groups *g,
                       uint32_t *count) {
    const uint32_t n_rows = ctx->step.n_rows;
    memset(count, 0, l->n_experts * sizeof *count);
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t rank = 0; rank < l->top_k; rank++)
            if (routed->f[row * routed->ld + rank] >= 0)
                count[(uint32_t)routed->f[row * routed->ld + rank]]++;
    uint32_t at = 0;
    g->n_active = 0;
    for (uint32_t e = 0; e < l->n_experts; e++) {
        if (!count[e]) continue;
        g->experts[g->n_active] = e;
        g->first[g->n_active++] = at;
        const uint32_t n = count[e];
        count[e] = at;
        at += n;
    }
    g->first[g->n_active] = at;
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t rank = 0; rank < l->top_k; rank++) {
            const float id = routed->f[row * routed->ld + rank];
            if (id < 0) continue;
            const uint32_t i = count[(uint32_t)id]++;
            g->rows[i] = (int32_t)row;
            g->slots[i] = (int32_t)(row * l->top_k + rank);
        }
}

static uint64_t expert_bytes(const cflow_model *m, uint32_t layer) {
    uint64_t bytes = 0;
    for (cflow_role role = CFLOW_EXPERT_GATE; role <= CFLOW_EXPERT_DOWN; role++) {
        const matrix w = model_expert(m, layer, 0, role);
        bytes += w.n_stripes * w.stripe_bytes;
    }
    return bytes;
}

void select_run(cflow_ctx *ctx, const op *o, int thread) {
    const cflow_layer *l = model_layer(ctx->model, (uint32_t)o->layer);
    const buffer *logits = ctx_buffer(ctx, o->in[0]), *routed = ctx_buffer(ctx, o->out[0]);
    const buffer *weights = ctx_buffer(ctx, o->out[1]);
    groups *g = ctx_buffer(ctx, o->out[2])->groups;
    for (uint32_t row = 0; row < ctx->step.n_rows; row++) {
        const uint32_t asked = (uint32_t)ctx->step.rows[row].n_experts;
        select_row(ctx, l, logits->f + row * logits->ld,
                   asked && asked < l->top_k ? asked : l->top_k, ctx_scratch(ctx, thread),
                   routed->f + row * routed->ld, weights->f + row * weights->ld);
    }
    group_rows(ctx, l, routed, g, ctx_scratch(ctx, thread));
    atomic_fetch_add(&ctx->read_bytes, g->n_active * expert_bytes(ctx->model, (uint32_t)o->layer));
}

/* ---- OP_EXPERT_GATED and OP_EXPERT_DOWN: one span is one active expert ---- */

static const groups *op_groups(const cflow_ctx *ctx, const op *o) {
    return ctx_buffer(ctx, o->in[1])->groups;
}

uint32_t expert_spans(const cflow_ctx *ctx, const op *o) {
    return op_groups(ctx, o)->n_active;
}

static matrix op_matrix(const cflow_ctx *ctx, const op *o, uint32_t index, cflow_role role) {
    return model_expert(ctx->model, (uint32_t)o->layer, op_groups(ctx, o)->experts[index], role);
}

span expert_span(const cflow_ctx *ctx, const op *o, uint32_t index) {
    const groups *g = op_groups(ctx, o);
    const uint64_t m = g->first[index + 1] - g->first[index];
    if (o->kind == OP_EXPERT_DOWN) {
        const matrix down = op_matrix(ctx, o, index, CFLOW_EXPERT_DOWN);
        return (span){matrix_units(&down), m * matrix_unit_bytes(&down)};
    }
    const matrix gate = op_matrix(ctx, o, index, CFLOW_EXPERT_GATE);
    const matrix up = op_matrix(ctx, o, index, CFLOW_EXPERT_UP);
    return (span){matrix_units(&gate), m * (matrix_unit_bytes(&gate) + matrix_unit_bytes(&up))};
}

void expert_run(const cflow_ctx *ctx, const op *o, uint32_t index, uint32_t first, uint32_t end,
                int thread) {
    const groups *g = op_groups(ctx, o);
    const uint32_t m = g->first[index + 1] - g->first[index];
    const int32_t *rows = g->rows + g->first[index], *slots = g->slots + g->first[index];
    const activations x = buffer_activations(ctx_buffer(ctx, o->in[0]));
    const buffer *y = ctx_buffer(ctx, o->out[0]);
    if (o->kind == OP_EXPERT_DOWN) {
        const matrix down = op_matrix(ctx, o, index, CFLOW_EXPERT_DOWN);
        multiply(ctx, &down, first, end, x, slots, m, slots, y->f + first * UNIT, y->ld);
        return;
    }
    const matrix gate = op_matrix(ctx, o, index, CFLOW_EXPERT_GATE);
    const matrix up = op_matrix(ctx, o, index, CFLOW_EXPERT_UP);
    multiply_gated(ctx, model_layer(ctx->model, (uint32_t)o->layer), &gate, &up, first, end, x,
                   rows, m, slots, y, thread);
}
