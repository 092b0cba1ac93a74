/* The step: stages of the plan, then the head. Each stage's work is one line of bytes cut evenly.
 */
#include <math.h>
#include <string.h>

#include "ctx.h"
#include "sample.h"
#include "status.h"

/* ---- matrices ---- */

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
    const uint32_t per_stripe = w->stripe_rows / UNIT;
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

void buffer_quantize(const cflow_ctx *ctx, const buffer *b, size_t row, size_t column, uint32_t n) {
    if (!b->q) return;
    const size_t at = row * b->ld + column;
    ctx->k.quantize(b->f + at, n, b->q + at, b->scale + at / 32, b->sum + at / 16);
}

void multiply_gated(const cflow_ctx *ctx, const cflow_layer *l, const matrix *gate,
                    const matrix *up, uint32_t first, uint32_t end, activations x,
                    const int32_t *x_rows, uint32_t m, const int32_t *y_rows, const buffer *hidden,
                    int thread) {
    enum { LD = STRIPE_UNITS * UNIT };
    float *g = ctx_scratch(ctx, thread), *u = g + GATED_ROWS * LD;
    for (uint32_t unit = first, n; unit < end; unit += n) {
        const uint32_t per_stripe = gate->stripe_rows / UNIT;
        n = per_stripe - unit % per_stripe;
        if (n > end - unit) n = end - unit;
        for (uint32_t row = 0, rows; row < m; row += rows) {
            rows = m - row < GATED_ROWS ? m - row : GATED_ROWS;
            const activations part = x_rows ? x : activations_from(x, row);
            const int32_t *part_rows = x_rows ? x_rows + row : NULL;
            multiply(ctx, gate, unit, unit + n, part, part_rows, rows, NULL, g, LD);
            multiply(ctx, up, unit, unit + n, part, part_rows, rows, NULL, u, LD);
            for (uint32_t i = 0; i < rows; i++) {
                const size_t y = (size_t)(y_rows ? y_rows[row + i] : (int32_t)(row + i));
                ctx->k.gated(g + i * LD, u + i * LD, n * UNIT, (cflow_activation)l->activation,
                             (int)l->activation_on_up, hidden->f + y * hidden->ld + unit * UNIT);
                buffer_quantize(ctx, hidden, y, unit * UNIT, n * UNIT);
            }
        }
    }
}

static void matmul_run(const cflow_ctx *ctx, const op *o, const piece *one, uint32_t first,
                       uint32_t end) {
    const buffer *y = ctx_buffer(ctx, one->out);
    const uint32_t m = ctx->step.n_rows;
    multiply(ctx, one->w, first, end, buffer_activations(ctx_buffer(ctx, o->in[0])), NULL, m, NULL,
             y->f + first * UNIT, y->ld);
    if (!one->bias) return;
    const uint32_t last = end * UNIT < one->w->n_rows ? end * UNIT : one->w->n_rows;
    for (uint32_t row = 0; row < m; row++)
        for (uint32_t i = first * UNIT; i < last; i++) y->f[row * y->ld + i] += one->bias[i];
}

static void gated_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread) {
    multiply_gated(ctx, model_layer(ctx->model, (uint32_t)o->layer), o->gate, o->up, first, end,
                   buffer_activations(ctx_buffer(ctx, o->in[0])), NULL, ctx->step.n_rows, NULL,
                   ctx_buffer(ctx, o->out[0]), thread);
}

/* ---- the residual stream ---- */

float sigmoid(const cflow_ctx *ctx, float x) {
    const float minus = -x;
    float e;
    ctx->k.exp_shifted(&minus, 1, 0.0f, &e);
    return 1.0f / (1.0f + e);
}

static void embed(const cflow_ctx *ctx, int32_t token, float *x) {
    const matrix *w = &ctx->model->global[CFLOW_EMBEDDING];
    const uint32_t row = (uint32_t)token, n = w->n_cols;
    stripe_row(w->encoding, w->data + row / w->stripe_rows * w->stripe_stride, w->stripe_rows, n,
               row % w->stripe_rows, x);
    const float scale = ctx->model->header.embedding_scale;
    if (scale != 1.0f)
        for (uint32_t i = 0; i < n; i++) x[i] *= scale;
}

/* A routed term: its ranks, weighted, in order. Unused ranks have weight 0 and stale contents. */
static const float *sum_ranks(const cflow_ctx *ctx, const term *t, uint32_t row, uint32_t n) {
    const uint32_t per_row = ctx->model->plan->values[t->value].per_row;
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

static void combine_row(const cflow_ctx *ctx, const op *o, uint32_t row) {
    const uint32_t n = ctx->model->header.d_model;
    const buffer *stream = ctx_buffer(ctx, o->out[0]);
    float *x = stream->f + row * stream->ld;
    if (o->base == NO_VALUE)
        embed(ctx, ctx->step.rows[row].token, x);
    else
        memcpy(x, ctx_buffer(ctx, o->base)->f + row * stream->ld, n * sizeof *x);
    for (uint32_t i = 0; i < o->n_terms; i++) {
        const term *t = &o->terms[i];
        const buffer *b = ctx_buffer(ctx, t->value);
        const float *add = t->weights == NO_VALUE ? b->f + row * b->ld : sum_ranks(ctx, t, row, n);
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
        const float r = 1.0f / sqrtf(ctx->k.sum_squares(x, n) / (float)n + w->eps);
        ctx->k.scale_weight(x, r, matrix_vector(w->weight), w->offset, n, b->f + row * b->ld);
        buffer_quantize(ctx, b, row, 0, (uint32_t)round_up(n, 32));
    }
}

/* ---- stages ---- */

static uint32_t n_spans(const cflow_ctx *ctx, const op *o) {
    if (o->kind == OP_MATMUL) return o->n_pieces;
    if (o->kind == OP_EXPERT_GATED || o->kind == OP_EXPERT_DOWN) return expert_spans(ctx, o);
    return 1;
}

static span span_of(const cflow_ctx *ctx, const op *o, uint32_t index) {
    const uint32_t m = ctx->step.n_rows;
    switch (o->kind) {
    case OP_COMBINE:
        return (span){m, 8ull * ctx->model->header.d_model * (o->n_terms + 1)};
    case OP_MATMUL:
        return (span){matrix_units(o->pieces[index].w), m * matrix_unit_bytes(o->pieces[index].w)};
    case OP_GATED:
        return (span){matrix_units(o->gate),
                      m * (matrix_unit_bytes(o->gate) + matrix_unit_bytes(o->up))};
    case OP_KV:
        return kv_span(ctx, o);
    case OP_ATTEND:
        return attend_span(ctx, o);
    case OP_SELECT:
        return (span){1, 1};
    case OP_EXPERT_GATED:
    case OP_EXPERT_DOWN:
        break;
    }
    return expert_span(ctx, o, index);
}

static void run_span(cflow_ctx *ctx, const op *o, uint32_t index, uint32_t first, uint32_t end,
                     int thread) {
    switch (o->kind) {
    case OP_COMBINE:
        for (uint32_t row = first; row < end; row++) combine_row(ctx, o, row);
        break;
    case OP_MATMUL:
        matmul_run(ctx, o, &o->pieces[index], first, end);
        break;
    case OP_GATED:
        gated_run(ctx, o, first, end, thread);
        break;
    case OP_KV:
        kv_run(ctx, o, first, end, thread);
        break;
    case OP_ATTEND:
        attend_run(ctx, o, first, end, thread);
        break;
    case OP_SELECT:
        select_run(ctx, o, thread);
        break;
    case OP_EXPERT_GATED:
    case OP_EXPERT_DOWN:
        expert_run(ctx, o, index, first, end, thread);
        break;
    }
}

/* Units of a span whose start lies in [lo, hi) on the stage's line of costs, the span starting at
 * `at`. */
static uint32_t units_before(uint64_t point, uint64_t at, span s) {
    if (point <= at) return 0;
    const uint64_t n = (point - at + s.cost - 1) / s.cost;
    return n < s.units ? (uint32_t)n : s.units;
}

static void run_stage(cflow_ctx *ctx, uint32_t stage, int thread) {
    const plan *p = ctx->model->plan;
    const uint32_t first = p->first_op[stage], end = p->first_op[stage + 1];
    const uint64_t n_threads = (uint64_t)ctx->options.n_threads;
    uint64_t total = 0, at = 0;
    for (uint32_t i = first; i < end; i++)
        for (uint32_t j = 0; j < n_spans(ctx, &p->ops[i]); j++) {
            const span s = span_of(ctx, &p->ops[i], j);
            total += s.units * s.cost;
        }
    const uint64_t lo = total * (uint64_t)thread / n_threads;
    const uint64_t hi = total * ((uint64_t)thread + 1) / n_threads;
    for (uint32_t i = first; i < end; i++)
        for (uint32_t j = 0; j < n_spans(ctx, &p->ops[i]); j++) {
            const span s = span_of(ctx, &p->ops[i], j);
            const uint32_t u0 = units_before(lo, at, s), u1 = units_before(hi, at, s);
            if (u0 < u1) run_span(ctx, &p->ops[i], j, u0, u1, thread);
            at += s.units * s.cost;
        }
}

/* ---- the head ---- */

static const matrix *head_matrix(const cflow_model *m) {
    return &m->global[m->header.tied ? CFLOW_EMBEDDING : CFLOW_HEAD];
}

static void head_run(cflow_ctx *ctx, const int32_t *rows, uint32_t n, float *y, int thread) {
    const matrix *w = head_matrix(ctx->model);
    const uint64_t units = matrix_units(w), n_threads = (uint64_t)ctx->options.n_threads;
    const uint32_t first = (uint32_t)(units * (uint64_t)thread / n_threads);
    const uint32_t end = (uint32_t)(units * ((uint64_t)thread + 1) / n_threads);
    const buffer *x = ctx_buffer(ctx, ctx->model->plan->final_norm);
    if (first < end)
        multiply(ctx, w, first, end, buffer_activations(x), rows, n, NULL, y + first * UNIT,
                 ctx->vocab_ld);
    pool_barrier(ctx->pool, thread);
}

static void check_logits(cflow_ctx *ctx, int thread) {
    const uint32_t n = ctx->model->header.vocab_size;
    for (uint32_t i = (uint32_t)thread; i < ctx->step.n_logits;
         i += (uint32_t)ctx->options.n_threads)
        if (!isfinite(ctx->k.max(ctx->logits + i * ctx->vocab_ld, n)))
            ctx->step.row_status[ctx->step.logit_rows[i]] = CFLOW_ENUMERIC;
}

static void run_scores(cflow_ctx *ctx, int thread) {
    const step *s = &ctx->step;
    const int32_t n_vocab = (int32_t)ctx->model->header.vocab_size;
    for (uint32_t at = 0; at < s->n_scores; at += SCORE_ROWS) {
        const uint32_t n = s->n_scores - at < SCORE_ROWS ? s->n_scores - at : SCORE_ROWS;
        head_run(ctx, s->score_rows + at, n, ctx->score_logits, thread);
        for (uint32_t i = (uint32_t)thread; i < n; i += (uint32_t)ctx->options.n_threads) {
            const int32_t row = s->score_rows[at + i];
            cflow_score *score = &s->scores[at + i];
            score_row(&ctx->k, ctx->score_logits + i * ctx->vocab_ld, n_vocab, s->rows[row].target,
                      s->rows[row].n_top, score);
            if (!isfinite(score->logprob)) s->row_status[row] = CFLOW_ENUMERIC;
        }
        pool_barrier(ctx->pool, thread);
    }
}

/* ---- the step ---- */

static void run_step(void *arg, int thread) {
    cflow_ctx *ctx = arg;
    step *s = &ctx->step;
    for (uint32_t stage = 0; stage < ctx->model->plan->n_stages; stage++) {
        if (thread == 0) {
            s->stop[stage & 1] = atomic_load(&ctx->cancelled);
            atomic_fetch_add(&ctx->stage_count, 1);
        }
        run_stage(ctx, stage, thread);
        pool_barrier(ctx->pool, thread);
        /* Written again only two stages on, after every thread has passed the next barrier. */
        if (s->stop[stage & 1]) return;
    }
    if (s->n_logits) {
        head_run(ctx, s->logit_rows, s->n_logits, ctx->logits, thread);
        check_logits(ctx, thread);
    }
    run_scores(ctx, thread);
}

static cflow_status check_row(const cflow_ctx *ctx, const cflow_row *r, int32_t i,
                              cflow_error *err) {
    const cflow_header *h = &ctx->model->header;
    if (r->sequence < 0 || r->sequence >= ctx->options.max_sequences)
        return fail(err, CFLOW_EINVAL, "row %d: sequence %d of %d", i, r->sequence,
                    ctx->options.max_sequences);
    if (r->token < 0 || (uint32_t)r->token >= h->vocab_size)
        return fail(err, CFLOW_EINVAL, "row %d: token %d of a vocabulary of %u", i, r->token,
                    h->vocab_size);
    if (r->position < 0 || r->position >= ctx->options.max_context ||
        r->position / CFLOW_KV_BLOCK >= ctx->table_size[r->sequence])
        return fail(err, CFLOW_EINVAL,
                    "row %d: position %d lies outside the %d blocks of sequence %d", i, r->position,
                    ctx->table_size[r->sequence], r->sequence);
    if ((r->flags & CFLOW_ROW_SCORE) && (r->target < 0 || (uint32_t)r->target >= h->vocab_size ||
                                         r->n_top < 0 || r->n_top > CFLOW_MAX_TOP))
        return fail(err, CFLOW_EINVAL, "row %d: target %d or n_top %d out of range", i, r->target,
                    r->n_top);
    if (r->n_experts < 0) return fail(err, CFLOW_EINVAL, "row %d: %d experts", i, r->n_experts);
    return CFLOW_OK;
}

static cflow_status begin_step(cflow_ctx *ctx, const cflow_row *rows, int32_t n_rows,
                               int32_t *row_status, cflow_score *scores, cflow_error *err) {
    if (n_rows < 1 || n_rows > ctx->options.max_rows)
        return fail(err, CFLOW_EINVAL, "%d rows; a step takes 1 to %d", n_rows,
                    ctx->options.max_rows);
    step *s = &ctx->step;
    s->rows = rows;
    s->n_rows = (uint32_t)n_rows;
    s->row_status = row_status;
    s->scores = scores;
    s->n_logits = s->n_scores = 0;
    s->attended = 0;
    for (int32_t i = 0; i < n_rows; i++) {
        const cflow_status status = check_row(ctx, &rows[i], i, err);
        if (status != CFLOW_OK) return status;
        row_status[i] = CFLOW_OK;
        s->attended += (uint64_t)rows[i].position + 1;
        ctx->logit_of_row[i] = -1;
        if (rows[i].flags & CFLOW_ROW_SCORE) s->score_rows[s->n_scores++] = i;
        if (!(rows[i].flags & CFLOW_ROW_LOGITS)) continue;
        if (s->n_logits == (uint32_t)ctx->options.max_sequences)
            return fail(err, CFLOW_EINVAL, "more than %d rows keep their logits",
                        ctx->options.max_sequences);
        ctx->logit_of_row[i] = (int32_t)s->n_logits;
        s->logit_rows[s->n_logits++] = i;
    }
    if (s->n_scores && !scores) return fail(err, CFLOW_EINVAL, "SCORE rows but nowhere for scores");
    return CFLOW_OK;
}

static void count_bytes(cflow_ctx *ctx) {
    const plan *p = ctx->model->plan;
    const matrix *head = head_matrix(ctx->model);
    const uint64_t head_bytes = (uint64_t)head->n_stripes * head->stripe_bytes;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind == OP_MATMUL || p->ops[i].kind == OP_GATED) bytes += p->ops[i].bytes;
    bytes += head_bytes *
             ((ctx->step.n_logits != 0) + (ctx->step.n_scores + SCORE_ROWS - 1) / SCORE_ROWS);
    atomic_fetch_add(&ctx->read_bytes, bytes);
}

cflow_status cflow_ctx_step(cflow_ctx *ctx, const cflow_row *rows, int32_t n_rows,
                            int32_t *row_status, cflow_score *scores, cflow_error *err) {
    ctx->step.n_rows = 0;
    const cflow_status status = begin_step(ctx, rows, n_rows, row_status, scores, err);
    if (status != CFLOW_OK) {
        ctx->step.n_rows = 0;
        return status;
    }
    atomic_store(&ctx->cancelled, 0);
    pool_run(ctx->pool, run_step, ctx);
    if (ctx->step.stop[0] || ctx->step.stop[1]) {
        ctx->step.stop[0] = ctx->step.stop[1] = 0;
        ctx->step.n_rows = 0;
        return fail(err, CFLOW_ECANCELLED, "the step was cancelled");
    }
    count_bytes(ctx);
    return CFLOW_OK;
}

void cflow_ctx_cancel(cflow_ctx *ctx) {
    atomic_store(&ctx->cancelled, 1);
}
