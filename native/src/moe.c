/* Mixture of experts: choosing, gathering the rows that chose the same, and the experts themselves.
 */
#include "moe.h"

#include <math.h>
#include <string.h>

#include "waves.h"

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

/* How many experts the row chooses. */
static uint32_t n_chosen(const cflow_ctx *ctx, const cflow_layer *l, uint32_t row) {
    const uint32_t asked = (uint32_t)ctx->step.rows[row].n_experts;
    if (ctx->step.row_status[row]) return 0;
    return asked && asked < l->top_k ? asked : l->top_k;
}

/* A row's ranks in [first, end) are in the group: the last ones in the late one. */
static void find_ranks(const cflow_ctx *ctx, const op *o, uint32_t row, int is_late,
                       uint32_t *first, uint32_t *end) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const uint32_t n = n_chosen(ctx, l, row), defer = ctx->plan->defer;
    uint32_t split = l->top_k;
    if (o->out[4] != NO_VALUE) split = n > defer ? n - defer : 1;
    *first = is_late ? split : 0;
    *end = is_late ? l->top_k : split;
}

/* Counting sort of all (row, rank) of the group by expert. */
static void group_rows(const cflow_ctx *ctx, const op *o, const buffer *routed, groups *g,
                       int is_late, uint32_t *count) {
    const uint32_t layer = (uint32_t)o->layer, n_rows = ctx->step.n_rows;
    const cflow_layer *l = model_layer(ctx->weights, layer);
    uint32_t rank, end;
    memset(count, 0, l->n_experts * sizeof *count);
    for (uint32_t row = 0; row < n_rows; row++)
        for (find_ranks(ctx, o, row, is_late, &rank, &end); rank < end; rank++)
            if (routed->f[row * routed->ld + rank] >= 0)
                count[(uint32_t)routed->f[row * routed->ld + rank]]++;
    uint32_t at = 0;
    g->n_done = g->n_gated = g->n_ready = g->n_active = 0;
    g->is_demanded = 0;
    for (uint32_t e = 0; e < l->n_experts; e++) {
        const uint32_t n = count[e];
        if (!n) continue;
        g->experts[g->n_active++] =
            (active_expert){.record = model_record(ctx->weights, layer, e), .first = at, .n = n};
        count[e] = at;
        at += n;
    }
    for (uint32_t row = 0; row < n_rows; row++)
        for (find_ranks(ctx, o, row, is_late, &rank, &end); rank < end; rank++) {
            const float id = routed->f[row * routed->ld + rank];
            if (id < 0) continue;
            const uint32_t i = count[(uint32_t)id]++;
            g->rows[i] = (int32_t)row;
            g->slots[i] = (int32_t)(row * l->top_k + rank);
        }
}

/* Weights of late ranks go to a buffer of their own; each is 0 where the other counts. */
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
    const buffer *weights = ctx_buffer(ctx, o->out[is_late ? 3 : 1]);
    groups *g = ctx_buffer(ctx, o->out[is_late ? 4 : 2])->groups;
    group_rows(ctx, o, ctx_buffer(ctx, o->out[0]), g, is_late, scratch);
    g->weights = weights->f;
    g->weights_ld = weights->ld;
}

void select_run(cflow_ctx *ctx, const op *o, int thread) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const buffer *logits = ctx_buffer(ctx, o->in[0]), *routed = ctx_buffer(ctx, o->out[0]);
    const buffer *weights = ctx_buffer(ctx, o->out[1]);
    const buffer *late = o->out[3] == NO_VALUE ? NULL : ctx_buffer(ctx, o->out[3]);
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

/* ---- OP_GUESS ---- */

/* The experts with the most weight over all rows, the heaviest first: of the cache no more than a
 * quarter, so that guesses drive out neither each other nor what the layer itself needs. */
void guess_run(cflow_ctx *ctx, const op *o, int thread) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const buffer *logits = ctx_buffer(ctx, o->in[0]);
    float *p = ctx_scratch(ctx, thread), *votes = p + l->n_experts;
    float *ids = votes + l->n_experts, *weights = ids + l->top_k;
    uint32_t *records = ctx_scratch(ctx, thread), n = 0; /* p is done by then */
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

/* ---- OP_EXPERT_GATED and OP_EXPERT_DOWN: one span is one expert that is in the op ---- */

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
    const int32_t *rows = g->rows + e->first, *slots = g->slots + e->first;
    const activations x = buffer_activations(ctx_buffer(ctx, o->in[0]));
    const buffer *y = ctx_buffer(ctx, o->out[0]);
    if (o->kind == OP_EXPERT_DOWN) {
        const matrix down = op_matrix(ctx, o, e, CFLOW_EXPERT_DOWN);
        multiply(ctx, &down, first, end, x, slots, e->n, slots, y->f + first * UNIT, y->ld);
        return;
    }
    const matrix gate = op_matrix(ctx, o, e, CFLOW_EXPERT_GATE);
    const matrix up = op_matrix(ctx, o, e, CFLOW_EXPERT_UP);
    multiply_gated(ctx, model_layer(ctx->weights, (uint32_t)o->layer), &gate, &up, first, end, x,
                   rows, e->n, slots, y, thread);
}
