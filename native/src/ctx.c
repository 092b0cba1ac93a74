/* Reads the results of a step from its context: logits, faults, values, times. Samples tokens. */
#include "ctx.h"

#include <string.h>

#include "sample.h"
#include "status.h"

const char *cflow_ctx_isa(const cflow_ctx *ctx) {
    return ctx->k.isa;
}
uint64_t cflow_ctx_stage_count(const cflow_ctx *ctx) {
    return atomic_load(&ctx->stage_count);
}
uint64_t cflow_ctx_read_bytes(const cflow_ctx *ctx) {
    return atomic_load(&ctx->read_bytes);
}
void cflow_ctx_stage_times(const cflow_ctx *ctx, cflow_stage_time *out) {
    for (uint32_t i = 0; i < ctx->plan->n_stages + 2; i++)
        out[i] =
            (cflow_stage_time){atomic_load(&ctx->times[i].ns), atomic_load(&ctx->times[i].idle_ns)};
}

const float *cflow_ctx_logits(const cflow_ctx *ctx, int32_t row) {
    if (row < 0 || (uint32_t)row >= ctx->step.n_rows || ctx->logit_of_row[row] < 0) return NULL;
    return ctx->logits + (size_t)ctx->logit_of_row[row] * ctx->vocab_ld;
}

const cflow_row_usage *cflow_ctx_usage(const cflow_ctx *ctx) {
    return ctx->usage;
}

void cflow_ctx_row_error(const cflow_ctx *ctx, int32_t row, cflow_error *out) {
    *out = (cflow_error){{0}};
    if (!ctx->faults || row < 0 || (uint32_t)row >= ctx->step.n_rows) return;
    const row_fault *fault = &ctx->faults[row];
    if (fault->result && fault->record == NO_RECORD)
        fail(out, record_status(fault->result), "layer %d: %s", fault->layer,
             tier_result_text(fault->result));
    else if (fault->result)
        fail(out, record_status(fault->result), "layer %d, expert %u: %s", fault->layer,
             ctx->weights->records[fault->record].expert, tier_result_text(fault->result));
}

cflow_status cflow_ctx_value(const cflow_ctx *ctx, const char *name, int32_t row, float *out,
                             int32_t n, int32_t *n_out, cflow_error *err) {
    const plan *p = ctx->plan;
    /* Only the head reads the last norm, so nothing overwrites it before the next step. */
    if (!ctx->options.keep_values && strcmp(name, p->values[p->final_norm].name))
        return fail(err, CFLOW_EINVAL, "the context does not keep values");
    if (row < 0 || (uint32_t)row >= ctx->step.n_rows)
        return fail(err, CFLOW_EINVAL, "row %d of a step of %u", row, ctx->step.n_rows);
    for (uint32_t v = 0; v < p->n_values; v++) {
        const value *one = &p->values[v];
        if (strcmp(one->name, name) || one->n_experts) continue;
        const uint64_t floats = (uint64_t)one->width * one->per_row; /* may exceed 32 bits */
        *n_out = floats > INT32_MAX ? 0 : (int32_t)floats;
        if (n < 0 || (uint64_t)n < floats)
            return fail(err, CFLOW_EINVAL, "%s has %llu floats, room for %d", name,
                        (unsigned long long)floats, n);
        const buffer *b = ctx_buffer(ctx, v);
        for (uint32_t i = 0; i < one->per_row; i++)
            memcpy(out + (size_t)i * one->width, b->f + ((size_t)row * one->per_row + i) * b->ld,
                   one->width * sizeof *out);
        return CFLOW_OK;
    }
    return fail(err, CFLOW_EINVAL, "the plan has no value %s", name);
}

/* ---- sampling ---- */

typedef struct {
    const cflow_ctx *ctx;
    const cflow_pick *picks;
    int32_t n;
    cflow_choice *choices;
} sampling;

static void run_picks(void *arg, int thread) {
    const sampling *s = arg;
    const cflow_header *h = &s->ctx->weights->header;
    for (int32_t i = thread; i < s->n; i += s->ctx->options.n_threads)
        s->choices[i].status = sample_row(
            &s->ctx->k, cflow_ctx_logits(s->ctx, s->picks[i].row), (int32_t)h->vocab_size,
            (int32_t)h->n_tokens, &s->picks[i], ctx_scratch(s->ctx, thread), &s->choices[i]);
}

cflow_status cflow_ctx_sample(cflow_ctx *ctx, const cflow_pick *picks, int32_t n_picks,
                              cflow_choice *choices, cflow_error *err) {
    const int32_t n_vocab = (int32_t)ctx->weights->header.vocab_size;
    for (int32_t i = 0; i < n_picks; i++) {
        const cflow_pick *p = &picks[i];
        if (!cflow_ctx_logits(ctx, p->row))
            return fail(err, CFLOW_EINVAL, "pick %d: row %d kept no logits", i, p->row);
        if (p->n_top < -1 || p->n_top > CFLOW_MAX_TOP)
            return fail(err, CFLOW_EINVAL, "pick %d: n_top %d", i, p->n_top);
        for (int32_t j = 0; j < p->n_bias; j++)
            if (p->bias_ids[j] < 0 || p->bias_ids[j] >= n_vocab)
                return fail(err, CFLOW_EINVAL, "pick %d: bias on token %d of %d", i, p->bias_ids[j],
                            n_vocab);
        for (int32_t j = 0; j < p->n_history; j++)
            if (p->history[j] < 0 || p->history[j] >= n_vocab)
                return fail(err, CFLOW_EINVAL, "pick %d: token %d of %d", i, p->history[j],
                            n_vocab);
    }
    sampling s = {.ctx = ctx, .picks = picks, .n = n_picks, .choices = choices};
    if (n_picks == 1)
        run_picks(&s, 0);
    else if (n_picks > 1)
        pool_run(ctx->pool, run_picks, &s);
    return CFLOW_OK;
}
