/* Mixture of experts: the choice of experts, the rows of each, and their products. */
#include "moe.h"

#include <math.h>
#include <string.h>

#include "waves.h"

/* ---- OP_SELECT ---- */

/* Chooses the k experts with the largest softmax weights, of equals the smaller ids; their weights
 * are divided by their sum if l->renormalise, and multiplied by expert_scale. ids, weights
 * (top_k,): by rank, -1 and 0 past k. If the logits are NaN, no expert is chosen: id -1 and weight
 * NaN, so that the row's logits show it. p (n_experts,): scratch. */
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

/* The number of experts of a row; 0 for a row that has failed. */
static uint32_t n_chosen(const cflow_ctx *ctx, const cflow_layer *l, uint32_t row) {
    const uint32_t asked = (uint32_t)ctx->step.rows[row].n_experts;
    if (ctx->step.row_status[row]) return 0;
    return asked && asked < l->top_k ? asked : l->top_k;
}

/* The ranks [first, end) of a row that belong to a group: the last ones to the late group, if the
 * op has one (defer_experts). */
static void find_ranks(const cflow_ctx *ctx, const op *o, uint32_t row, int is_late,
                       uint32_t *first, uint32_t *end) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const uint32_t n = n_chosen(ctx, l, row), defer = ctx->plan->defer;
    uint32_t split = l->top_k;
    if (o->out[SELECT_LATE_GROUPS] != NO_VALUE) split = n > defer ? n - defer : 1;
    *first = is_late ? split : 0;
    *end = is_late ? l->top_k : split;
}

/* The expert that a row chose at a rank, -1: none. */
static int32_t chosen_expert(const cflow_ctx *ctx, const op *o, uint32_t row, uint32_t rank) {
    const buffer *routed = ctx_buffer(ctx, o->out[SELECT_IDS]);
    return (int32_t)routed->f[row * routed->ld + rank];
}

/* count (n_experts,): how many rows of the group chose each expert. */
static void count_rows(const cflow_ctx *ctx, const op *o, int is_late, uint32_t *count) {
    const uint32_t n_experts = model_layer(ctx->weights, (uint32_t)o->layer)->n_experts;
    uint32_t rank, end;
    memset(count, 0, n_experts * sizeof *count);
    for (uint32_t row = 0; row < ctx->step.n_rows; row++)
        for (find_ranks(ctx, o, row, is_late, &rank, &end); rank < end; rank++) {
            const int32_t e = chosen_expert(ctx, o, row, rank);
            if (e >= 0) count[e]++;
        }
}

/* Lists the experts that have rows. count[e] becomes the place of the first row of expert e. */
static void list_experts(const cflow_ctx *ctx, const op *o, groups *g, uint32_t *count) {
    const uint32_t layer = (uint32_t)o->layer;
    uint32_t first = 0;
    g->n_done = g->n_gated = g->n_ready = g->n_active = 0;
    g->is_demanded = 0;
    for (uint32_t e = 0; e < model_layer(ctx->weights, layer)->n_experts; e++) {
        const uint32_t n = count[e];
        if (!n) continue;
        g->experts[g->n_active++] =
            (active_expert){.record = model_record(ctx->weights, layer, e), .first = first, .n = n};
        count[e] = first;
        first += n;
    }
}

/* Writes each choice of the group after the choices that earlier rows made of its expert. next[e]:
 * the place of the next choice of expert e. */
static void place_rows(const cflow_ctx *ctx, const op *o, int is_late, groups *g, uint32_t *next) {
    const uint32_t top_k = model_layer(ctx->weights, (uint32_t)o->layer)->top_k;
    uint32_t rank, end;
    for (uint32_t row = 0; row < ctx->step.n_rows; row++)
        for (find_ranks(ctx, o, row, is_late, &rank, &end); rank < end; rank++) {
            const int32_t e = chosen_expert(ctx, o, row, rank);
            if (e < 0) continue;
            g->rows[next[e]] = (int32_t)row;
            g->outputs[next[e]] = (int32_t)(row * top_k + rank);
            next[e]++;
        }
}

/* Sorts the choices of the group by expert: a counting sort. scratch: (n_experts,). */
static void group_rows(const cflow_ctx *ctx, const op *o, int is_late, groups *g,
                       uint32_t *scratch) {
    count_rows(ctx, o, is_late, scratch);
    list_experts(ctx, o, g, scratch);
    place_rows(ctx, o, is_late, g, scratch);
}

/* Moves the weights of a row's late ranks to `late`; each buffer has 0 for the other's ranks. */
static void split_weights(const cflow_ctx *ctx, const op *o, uint32_t row, float *weights,
                          float *late) {
    uint32_t rank, end;
    find_ranks(ctx, o, row, 0, &rank, &end);
    memset(late, 0, end * sizeof *late);
    for (find_ranks(ctx, o, row, 1, &rank, &end); rank < end; rank++) {
        late[rank] = weights[rank];
        weights[rank] = 0;
    }
}

static void make_group(cflow_ctx *ctx, const op *o, int is_late, void *scratch) {
    const buffer *weights = ctx_buffer(ctx, o->out[is_late ? SELECT_LATE_WEIGHTS : SELECT_WEIGHTS]);
    groups *g = ctx_buffer(ctx, o->out[is_late ? SELECT_LATE_GROUPS : SELECT_GROUPS])->groups;
    group_rows(ctx, o, is_late, g, scratch);
    g->weights = weights->f;
    g->weights_ld = weights->ld;
}

void select_run(cflow_ctx *ctx, const op *o, int thread) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const buffer *logits = ctx_buffer(ctx, o->in[0]);
    const buffer *routed = ctx_buffer(ctx, o->out[SELECT_IDS]);
    const buffer *weights = ctx_buffer(ctx, o->out[SELECT_WEIGHTS]);
    const uint32_t late_weights = o->out[SELECT_LATE_WEIGHTS];
    const buffer *late = late_weights == NO_VALUE ? NULL : ctx_buffer(ctx, late_weights);
    for (uint32_t row = 0; row < ctx->step.n_rows; row++) {
        float *w = weights->f + row * weights->ld;
        select_row(ctx, l, logits->f + row * logits->ld, n_chosen(ctx, l, row),
                   ctx_scratch(ctx, thread), routed->f + row * routed->ld, w);
        if (late) split_weights(ctx, o, row, w, late->f + row * late->ld);
    }
    make_group(ctx, o, 0, ctx_scratch(ctx, thread));
    if (late) make_group(ctx, o, 1, ctx_scratch(ctx, thread));
    waves_selected(ctx, o, ctx_scratch(ctx, thread));
}

/* ---- OP_SPECULATE ---- */

/* Speculates on the experts with the largest sum of weights over all rows. At most a quarter of the
 * cache, so that they evict neither each other nor what the layer itself needs. */
void speculate_run(cflow_ctx *ctx, const op *o, int thread) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const buffer *logits = ctx_buffer(ctx, o->in[0]);
    float *p = ctx_scratch(ctx, thread), *votes = p + l->n_experts;
    float *ids = votes + l->n_experts, *weights = ids + l->top_k;
    uint32_t *records = ctx_scratch(ctx, thread); /* in the place of p, once p is not needed */
    uint32_t n = 0;
    memset(votes, 0, l->n_experts * sizeof *votes);
    for (uint32_t row = 0; row < ctx->step.n_rows; row++) {
        const uint32_t k = n_chosen(ctx, l, row);
        select_row(ctx, l, logits->f + row * logits->ld, k, p, ids, weights);
        for (uint32_t rank = 0; rank < k; rank++)
            if (ids[rank] >= 0) votes[(uint32_t)ids[rank]] += weights[rank];
    }
    while (n < tier_slots(ctx->tier) / 4) {
        uint32_t best = 0;
        for (uint32_t e = 1; e < l->n_experts; e++)
            if (votes[e] > votes[best]) best = e;
        if (!(votes[best] > 0)) break;
        votes[best] = 0;
        records[n++] = model_record(ctx->weights, (uint32_t)o->layer, best);
    }
    tier_speculate(ctx->tier, records, n);
}

/* ---- OP_EXPERT_GATED and OP_EXPERT_DOWN: a span for each expert that is in the op ---- */

uint32_t expert_spans(const cflow_ctx *ctx, const op *o) {
    const groups *g = op_groups(ctx, o);
    return o->kind == OP_EXPERT_DOWN ? g->n_gated - g->n_done : g->n_ready - g->n_gated;
}

static const active_expert *op_expert(const op *o, const groups *g, uint32_t index) {
    return &g->experts[index + (o->kind == OP_EXPERT_DOWN ? g->n_done : g->n_gated)];
}

static matrix op_matrix(const cflow_ctx *ctx, const op *o, const active_expert *e,
                        cflow_role role) {
    return matrix_in_record(model_matrix(ctx->weights, (uint32_t)o->layer, role), e->bytes);
}

span expert_span(const cflow_ctx *ctx, const op *o, uint32_t index) {
    const active_expert *e = op_expert(o, op_groups(ctx, o), index);
    if (o->kind == OP_EXPERT_DOWN) {
        const matrix down = op_matrix(ctx, o, e, CFLOW_EXPERT_DOWN);
        return matrix_span(&down, e->n * matrix_unit_bytes(&down));
    }
    const matrix gate = op_matrix(ctx, o, e, CFLOW_EXPERT_GATE);
    const matrix up = op_matrix(ctx, o, e, CFLOW_EXPERT_UP);
    return matrix_span(&gate, e->n * (matrix_unit_bytes(&gate) + matrix_unit_bytes(&up)));
}

void expert_run(const cflow_ctx *ctx, const op *o, uint32_t index, uint32_t first, uint32_t end,
                int thread) {
    const groups *g = op_groups(ctx, o);
    const active_expert *e = op_expert(o, g, index);
    const int32_t *rows = g->rows + e->first, *outputs = g->outputs + e->first;
    const activations x = buffer_activations(ctx_buffer(ctx, o->in[0]));
    const buffer *y = ctx_buffer(ctx, o->out[0]);
    if (o->kind == OP_EXPERT_DOWN) {
        const matrix down = op_matrix(ctx, o, e, CFLOW_EXPERT_DOWN);
        multiply(ctx, &down, first, end, x, outputs, e->n, outputs, y->f + first * UNIT, y->ld);
        return;
    }
    const matrix gate = op_matrix(ctx, o, e, CFLOW_EXPERT_GATE);
    const matrix up = op_matrix(ctx, o, e, CFLOW_EXPERT_UP);
    multiply_gated(ctx, model_layer(ctx->weights, (uint32_t)o->layer),
                   (gated_weights){.gate = &gate, .up = &up}, first, end, x, rows, e->n, outputs, y,
                   thread);
}
