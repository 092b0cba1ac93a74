#include "ops.h"

#include <math.h>
#include <string.h>

/* ---- matrices ---- */

/* x without its first `row` rows. */
static activations activations_from(activations x, size_t row) {
    const size_t ld = x.ld;
    return (activations){.f = x.f + row * ld,
                         .q = x.q ? x.q + row * ld : NULL,
                         .scale = x.scale ? x.scale + row * (ld / 32) : NULL,
                         .sum = x.sum ? x.sum + row * (ld / 16) : NULL,
                         .ld = ld};
}

void multiply(const cflow_ctx *ctx, const matrix *w, uint32_t first, uint32_t end, activations x,
              const int32_t *x_rows, uint32_t m, const int32_t *y_rows, float *y, size_t y_ld) {
    const uint32_t per_stripe = stripe_units(w);
    for (uint32_t u = first, n; u < end; u += n) {
        n = per_stripe - u % per_stripe;
        if (n > end - u) n = end - u;
        ctx->k.matmul[w->encoding](&(matmul_args){
            .stripe = w->data + u / per_stripe * w->stripe_stride,
            .stripe_groups = w->stripe_rows / 16,
            .first = u % per_stripe * 2,
            .n_groups = n * 2,
            .n_blocks = w->n_blocks,
            .m = m,
            .x = x,
            .x_rows = x_rows,
            .y_rows = y_rows,
            .y = y + (size_t)(u - first) * UNIT,
            .y_ld = y_ld,
        });
    }
}

void buffer_finish(const cflow_ctx *ctx, const buffer *b, size_t row, size_t column, uint32_t n) {
    const size_t at = row * b->ld + column, padded = round_up(n, 32);
    memset(b->f + at + n, 0,
           (padded - n) * sizeof *b->f); /* the slot's previous value may have left NaN */
    if (b->q)
        ctx->k.quantize(b->f + at, (uint32_t)padded, b->q + at, b->scale + at / 32,
                        b->sum + at / 16);
}

/* Adds elements [first, first + n) of a bias, as far as it goes, to y (m, ld). */
static void add_bias(const matrix *bias, uint32_t first, uint32_t n, uint32_t m, float *y,
                     size_t ld) {
    const float *b = matrix_vector(bias) + first;
    if (n > bias->n_cols - first) n = bias->n_cols - first;
    for (uint32_t row = 0; row < m; row++)
        for (uint32_t i = 0; i < n; i++) y[row * ld + i] += b[i];
}

enum { GATED_LD = STRIPE_UNITS * UNIT };

/* y (m, GATED_LD) = W x + bias for n units; ones where there is no W. */
static void multiply_side(const cflow_ctx *ctx, const matrix *w, const matrix *bias, uint32_t first,
                          uint32_t n, activations x, const int32_t *x_rows, uint32_t m, float *y) {
    if (!w) {
        for (uint32_t i = 0; i < m * GATED_LD; i++) y[i] = 1.0f;
        return;
    }
    multiply(ctx, w, first, first + n, x, x_rows, m, NULL, y, GATED_LD);
    if (bias) add_bias(bias, first * UNIT, n * UNIT, m, y, GATED_LD);
}

void multiply_gated(const cflow_ctx *ctx, const cflow_layer *l, gated_weights w, uint32_t first,
                    uint32_t end, activations x, const int32_t *x_rows, uint32_t m,
                    const int32_t *y_rows, const buffer *hidden, int thread) {
    float *g = ctx_scratch(ctx, thread), *u = g + GATED_ROWS * GATED_LD;
    const int on_up = l->activation_on_up || !w.gate;
    for (uint32_t unit = first, n; unit < end; unit += n) {
        const uint32_t per_stripe = stripe_units(w.up);
        n = per_stripe - unit % per_stripe;
        if (n > end - unit) n = end - unit;
        for (uint32_t row = 0, rows; row < m; row += rows) {
            rows = m - row < GATED_ROWS ? m - row : GATED_ROWS;
            const activations part = x_rows ? x : activations_from(x, row);
            const int32_t *part_rows = x_rows ? x_rows + row : NULL;
            multiply_side(ctx, w.gate, w.gate_bias, unit, n, part, part_rows, rows, g);
            multiply_side(ctx, w.up, w.up_bias, unit, n, part, part_rows, rows, u);
            for (uint32_t i = 0; i < rows; i++) {
                const size_t y = (size_t)(y_rows ? y_rows[row + i] : (int32_t)(row + i));
                ctx->k.gated(g + i * GATED_LD, u + i * GATED_LD, n * UNIT,
                             (cflow_activation)l->activation, on_up,
                             hidden->f + y * hidden->ld + unit * UNIT);
                buffer_finish(ctx, hidden, y, unit * UNIT, n * UNIT);
            }
        }
    }
}

void matmul_run(const cflow_ctx *ctx, const op *o, const piece *one, uint32_t first, uint32_t end) {
    const buffer *y = ctx_buffer(ctx, one->out);
    const uint32_t m = ctx->step.n_rows;
    multiply(ctx, one->w, first, end, buffer_activations(ctx_buffer(ctx, o->in[0])), NULL, m, NULL,
             y->f + first * UNIT, y->ld);
    if (one->bias)
        add_bias(one->bias, first * UNIT, (end - first) * UNIT, m, y->f + first * UNIT, y->ld);
}

void gated_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread) {
    multiply_gated(ctx, model_layer(ctx->weights, (uint32_t)o->layer), o->gated, first, end,
                   buffer_activations(ctx_buffer(ctx, o->in[0])), NULL, ctx->step.n_rows, NULL,
                   ctx_buffer(ctx, o->out[0]), thread);
}

/* ---- the residual stream ---- */

static float sigmoid(const cflow_ctx *ctx, float x) {
    const float minus = -x;
    float e;
    ctx->k.exp_shifted(&minus, 1, 0.0f, &e);
    return 1.0f / (1.0f + e);
}

/* x = the embedding of a token. */
static void embed(const cflow_ctx *ctx, int32_t token, float *x) {
    const matrix *w = &ctx->weights->global[CFLOW_EMBEDDING];
    const uint32_t row = (uint32_t)token, n = w->n_cols;
    stripe_row(w->encoding, w->data + row / w->stripe_rows * w->stripe_stride, w->stripe_rows, n,
               row % w->stripe_rows, x);
    const float scale = ctx->weights->header.embedding_scale;
    if (scale != 1.0f)
        for (uint32_t i = 0; i < n; i++) x[i] *= scale;
}

/* Sums the weighted outputs of a row's experts by rank. Skips ranks of weight 0, whose outputs may
 * not exist. */
static const float *sum_ranks(const cflow_ctx *ctx, const term *t, uint32_t row, uint32_t n) {
    const uint32_t per_row = ctx->plan->values[t->value].per_row;
    const buffer *each = ctx_buffer(ctx, t->value), *weights = ctx_buffer(ctx, t->weights);
    const buffer *sum = ctx_buffer(ctx, t->sum);
    const float *w = weights->f + row * weights->ld;
    float *out = sum->f + row * sum->ld;
    memset(out, 0, n * sizeof *out);
    for (uint32_t rank = 0; rank < per_row; rank++)
        if (w[rank] != 0.0f)
            ctx->k.add_scaled(out, each->f + ((size_t)row * per_row + rank) * each->ld, w[rank], n,
                              out);
    return out;
}

/* The sum of x in 16 lanes, then of the lanes. */
static float sum_of(const float *x, uint32_t n) {
    float lanes[16] = {0}, sum = 0;
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (uint32_t j = 0; j < 16; j++) lanes[j] += x[i + j];
    for (uint32_t j = 0; i < n; i++, j++) lanes[j] += x[i];
    for (uint32_t j = 0; j < 16; j++) sum += lanes[j];
    return sum;
}

/* y = norm(x); y is not x. */
static void apply_norm(const cflow_ctx *ctx, const norm_weights *w, const float *x, uint32_t n,
                       float *y) {
    if (!w->weight) {
        memcpy(y, x, n * sizeof *y);
        return;
    }
    if (w->kind == CFLOW_NORM_LAYER) {
        const float mean = sum_of(x, n) / (float)n;
        for (uint32_t i = 0; i < n; i++) y[i] = x[i] - mean;
        x = y;
    }
    const float r = 1.0f / sqrtf(ctx->k.sum_squares(x, n) / (float)n + w->eps);
    ctx->k.scale_weight(x, r, matrix_vector(w->weight), w->offset, n, y);
    if (w->bias) add_bias(w->bias, 0, n, 1, y, n);
}

/* The vector that a term adds to a row. */
static const float *term_row(const cflow_ctx *ctx, const term *t, uint32_t row, uint32_t n) {
    const buffer *b = ctx_buffer(ctx, t->value);
    if (t->weights != NO_VALUE) return sum_ranks(ctx, t, row, n);
    if (!t->norm.weight) return b->f + row * b->ld;
    const buffer *normed = ctx_buffer(ctx, t->sum);
    apply_norm(ctx, &t->norm, b->f + row * b->ld, n, normed->f + row * normed->ld);
    return normed->f + row * normed->ld;
}

void combine_row(const cflow_ctx *ctx, const op *o, uint32_t row) {
    const uint32_t n = ctx->weights->header.d_model;
    const buffer *stream = ctx_buffer(ctx, o->out[0]);
    float *x = stream->f + row * stream->ld;
    if (o->base == NO_VALUE)
        embed(ctx, ctx->step.rows[row].token, x);
    else
        memcpy(x, ctx_buffer(ctx, o->base)->f + row * stream->ld, n * sizeof *x);
    for (uint32_t i = 0; i < o->n_terms; i++) {
        const term *t = &o->terms[i];
        const float *add = term_row(ctx, t, row, n);
        float scale = t->scale;
        if (t->gate != NO_VALUE) {
            const buffer *gate = ctx_buffer(ctx, t->gate);
            scale *= sigmoid(ctx, gate->f[row * gate->ld]);
        }
        ctx->k.add_scaled(x, add, scale, n, x);
    }
    for (uint32_t i = 0; i < o->n_norms; i++) {
        const norm *w = &o->norms[i];
        const buffer *b = ctx_buffer(ctx, w->out);
        apply_norm(ctx, &w->weights, x, n, b->f + row * b->ld);
        buffer_finish(ctx, b, row, 0, n);
    }
}
