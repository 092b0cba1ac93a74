#include "head.h"

#include <math.h>

#include "sample.h"

enum { HEAD_PHASES = 2 }; /* of a batch: the product, then what needs its logits */

/* y = cap * tanh(y / cap), as attend in kernels.h caps scores. */
static void cap_logits(const cflow_ctx *ctx, float cap, uint32_t n, float *y) {
    float e[UNIT];
    for (uint32_t i = 0; i < n; i += UNIT) {
        for (uint32_t j = 0; j < UNIT; j++) e[j] = y[i + j] * (2 / cap);
        ctx->k.exp_shifted(e, UNIT, 0, e);
        for (uint32_t j = 0; j < UNIT; j++) y[i + j] = cap - 2 * cap / (1.0f + e[j]);
    }
}

/* Scales and caps n logits. */
static void finish_logits(const cflow_ctx *ctx, uint32_t n, float *y) {
    const cflow_header *h = &ctx->weights->header;
    if (h->logit_scale > 0)
        for (uint32_t i = 0; i < n; i++) y[i] *= h->logit_scale;
    if (h->logit_cap > 0) cap_logits(ctx, h->logit_cap, n, y);
}

static void compute_logits(cflow_ctx *ctx, const int32_t *rows, uint32_t n, float *y,
                           uint32_t first, uint32_t end) {
    const buffer *x = ctx_buffer(ctx, ctx->plan->final_norm);
    multiply(ctx, head_matrix(ctx->weights), first, end, buffer_activations(x), rows, n, NULL,
             y + first * UNIT, ctx->vocab_ld);
    for (uint32_t i = 0; i < n; i++)
        finish_logits(ctx, (end - first) * UNIT, y + i * ctx->vocab_ld + first * UNIT);
}

/* Fails the row of logits i if they are not all finite. */
static void check_logits(cflow_ctx *ctx, uint32_t i) {
    const uint32_t n = ctx->weights->header.vocab_size;
    int32_t *status = &ctx->step.row_status[ctx->step.logit_rows[i]];
    if (!*status && !isfinite(ctx->k.max(ctx->logits + i * ctx->vocab_ld, n)))
        *status = CFLOW_ENUMERIC;
}

/* Scores the i-th row of the batch that begins at `at`. */
static void score(cflow_ctx *ctx, uint32_t at, uint32_t i) {
    const step *s = &ctx->step;
    const int32_t row = s->score_rows[at + i];
    cflow_score *out = &s->scores[at + i];
    *out = no_score();
    if (s->row_status[row]) return;
    score_row(&ctx->k, ctx->score_logits + i * ctx->vocab_ld,
              (int32_t)ctx->weights->header.vocab_size, s->rows[row].target, s->rows[row].n_top,
              out);
    if (!isfinite(out->logprob)) s->row_status[row] = CFLOW_ENUMERIC;
}

uint32_t head_phases(const cflow_ctx *ctx) {
    const step *s = &ctx->step;
    const uint32_t score_batches = (s->n_scores + SCORE_ROWS - 1) / SCORE_ROWS;
    return HEAD_PHASES * ((s->n_logits != 0) + score_batches);
}

/* The number of rows in a batch. Batch 0 has the rows that keep their logits, if there are any;
 * each later one has up to SCORE_ROWS scored rows, from *at. */
static uint32_t head_rows(const cflow_ctx *ctx, uint32_t batch, uint32_t *at) {
    const step *s = &ctx->step;
    if (s->n_logits && batch == 0) return s->n_logits;
    *at = (batch - (s->n_logits != 0)) * SCORE_ROWS;
    return s->n_scores - *at < SCORE_ROWS ? s->n_scores - *at : SCORE_ROWS;
}

span head_span(const cflow_ctx *ctx, uint32_t phase) {
    uint32_t at;
    if (phase % HEAD_PHASES == 0) return matrix_span(head_matrix(ctx->weights), 1);
    return (span){.units = head_rows(ctx, phase / HEAD_PHASES, &at), .cost = 1};
}

void head_run(cflow_ctx *ctx, uint32_t phase, uint32_t first, uint32_t end) {
    const step *s = &ctx->step;
    const uint32_t batch = phase / HEAD_PHASES;
    const int kept = s->n_logits && batch == 0;
    uint32_t at = 0;
    const uint32_t n = head_rows(ctx, batch, &at);
    if (phase % HEAD_PHASES == 0) {
        compute_logits(ctx, kept ? s->logit_rows : s->score_rows + at, n,
                       kept ? ctx->logits : ctx->score_logits, first, end);
        return;
    }
    for (uint32_t i = first; i < end; i++) {
        if (kept)
            check_logits(ctx, i);
        else
            score(ctx, at, i);
    }
}
