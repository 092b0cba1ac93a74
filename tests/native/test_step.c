/* The step: the same bits for any number of threads, far more than cores included; cancelling;
 * weights that are NaN; and sizes that a context rejects. */
#include <pthread.h>
#include <sched.h>

#include "tiny_model.h"

enum { N_ROWS = TINY_ROWS, N_STEPS = 40, N_SCORES = 5 };

static cflow_ctx *open_ctx(cflow_model *model, int n_threads) {
    return tiny_open_ctx(
        model, (cflow_ctx_options){.n_threads = n_threads, .max_context = 64, .n_kv_blocks = 4});
}

/* A prompt of N_ROWS tokens, the last few scored and one kept, then single tokens of two sequences.
 */
static void run(cflow_ctx *ctx, float *logits, cflow_score *scores) {
    const size_t width = TINY_VOCAB;
    cflow_row rows[N_ROWS] = {{0}};
    int32_t status[N_ROWS];
    cflow_error err = {{0}};
    for (int32_t i = 0; i < N_ROWS; i++)
        rows[i] = (cflow_row){.sequence = i % 2, .token = i * 5 % TINY_TOKENS, .position = i / 2};
    for (int i = 0; i < N_SCORES; i++) {
        rows[N_ROWS - 1 - i].flags = CFLOW_ROW_SCORE;
        rows[N_ROWS - 1 - i].target = i;
        rows[N_ROWS - 1 - i].n_top = 3;
    }
    rows[N_ROWS - 1].flags |= CFLOW_ROW_LOGITS;
    CHECK(cflow_ctx_step(ctx, rows, N_ROWS, status, scores, &err) == CFLOW_OK, "%s", err.text);
    memcpy(logits, cflow_ctx_logits(ctx, N_ROWS - 1), width * sizeof *logits);
    for (int32_t i = 1; i < N_STEPS; i++) {
        const cflow_row row = {.sequence = i % 2,
                               .token = i % TINY_TOKENS,
                               .position = N_ROWS / 2 + i / 2,
                               .flags = CFLOW_ROW_LOGITS};
        CHECK(cflow_ctx_step(ctx, &row, 1, status, NULL, &err) == CFLOW_OK, "%s", err.text);
        CHECK(status[0] == CFLOW_OK, "row status %d", status[0]);
        memcpy(logits + (size_t)i * width, cflow_ctx_logits(ctx, 0), width * sizeof *logits);
    }
}

static void threads_do_not_change_bits(cflow_model *model) {
    static float want[N_STEPS * TINY_VOCAB], got[N_STEPS * TINY_VOCAB];
    static cflow_score want_scores[N_SCORES], got_scores[N_SCORES];
    cflow_ctx *one = open_ctx(model, 1);
    run(one, want, want_scores);
    cflow_ctx_close(one);
    for (int n_threads = 2; n_threads <= 32; n_threads *= 2) {
        cflow_ctx *ctx = open_ctx(model, n_threads);
        for (int round = 0; round < 8; round++) {
            memset(got, 0, sizeof got);
            memset(got_scores, 0, sizeof got_scores);
            run(ctx, got, got_scores);
            CHECK(!memcmp(want, got, sizeof got), "%d threads, round %d: other logits", n_threads,
                  round);
            CHECK(!memcmp(want_scores, got_scores, sizeof got_scores), "%d threads: other scores",
                  n_threads);
        }
        cflow_ctx_close(ctx);
    }
}

typedef struct {
    cflow_ctx *ctx;
    atomic_int is_over;
} canceller;

/* Cancels after 0 to 63 more stages: within a step, or after whole ones. */
static void *cancel_often(void *arg) {
    canceller *c = arg;
    for (uint64_t i = 0; !atomic_load(&c->is_over); i++) {
        const uint64_t stage = cflow_ctx_stage_count(c->ctx) + i % 64;
        while (cflow_ctx_stage_count(c->ctx) < stage && !atomic_load(&c->is_over)) sched_yield();
        cflow_ctx_cancel(c->ctx);
    }
    return NULL;
}

/* A step ends whole or cancelled, and a cancelled one does not affect later ones. */
static void cancelled_steps_leave_no_trace(cflow_model *model) {
    static float want[N_STEPS * TINY_VOCAB], got[N_STEPS * TINY_VOCAB];
    static cflow_score scores[N_SCORES];
    cflow_ctx *ctx = open_ctx(model, 2);
    run(ctx, want, scores);
    pthread_t thread;
    canceller c = {.ctx = ctx};
    pthread_create(&thread, NULL, cancel_often, &c);
    cflow_row rows[N_ROWS] = {{0}};
    int32_t status[N_ROWS];
    int n_cancelled = 0, n_whole = 0;
    for (int32_t i = 0; i < N_ROWS; i++)
        rows[i] = (cflow_row){.sequence = i % 2, .token = i % TINY_TOKENS, .position = i / 2};
    while (n_cancelled < 100 || n_whole < 100) {
        const cflow_status got_status = cflow_ctx_step(ctx, rows, N_ROWS, status, NULL, NULL);
        CHECK(got_status == CFLOW_OK || got_status == CFLOW_ECANCELLED, "status %d", got_status);
        n_cancelled += got_status == CFLOW_ECANCELLED;
        n_whole += got_status == CFLOW_OK;
    }
    atomic_store(&c.is_over, 1);
    pthread_join(thread, NULL);
    run(ctx, got, scores);
    CHECK(!memcmp(want, got, sizeof got), "other logits after cancelled steps");
    cflow_ctx_close(ctx);
}

/* If the router's logits are NaN, no expert is chosen; the row must not pass for a valid one. */
static void a_router_of_nan_fails_the_row(void) {
    tiny f = tiny_open();
    const cflow_tensor *router = tiny_tensor(&f, CFLOW_ROUTER, 1);
    float *weights = (float *)(void *)(f.resident + router->offset);
    for (uint32_t i = 0; i < 32 * TINY_D; i++) weights[i] = NAN;
    cflow_model *model = tiny_open_model(&f, (cflow_model_options){0}, NULL);
    cflow_ctx *ctx = open_ctx(model, 1);
    const cflow_row row = {.flags = CFLOW_ROW_LOGITS};
    int32_t status;
    CHECK(cflow_ctx_step(ctx, &row, 1, &status, NULL, NULL) == CFLOW_OK, "step");
    CHECK(status == CFLOW_ENUMERIC, "row status %d", status);
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

static void refused(const cflow_model *model, cflow_ctx_options options, const char *text) {
    uint64_t kv, rest;
    cflow_error err = {{0}};
    CHECK(cflow_ctx_memory(&kv, &rest, model, &options, &err) == CFLOW_EINVAL, "%s passes", text);
    CHECK(strstr(err.text, text), "%s", err.text);
}

/* Units are counted in 24 bits: here experts of 2^13 units, 2048 of them at work in one stage,
 * beside the two of a shared expert. */
static void more_than_can_be_counted_is_refused(const cflow_model *model) {
    cflow_ctx_options options = {.n_threads = 1,
                                 .max_rows = 2048,
                                 .max_sequences = 1,
                                 .max_context = 64,
                                 .n_kv_blocks = INT32_MAX};
    refused(model, options, "n_kv_blocks is 2147483647");
    options.n_kv_blocks = 2;
    cflow_model wide = *model;
    cflow_layer layers[2] = {model->weights.layers[0], model->weights.layers[1]};
    layers[1].n_experts = 2048;
    layers[1].top_k = 1;
    matrix blocks[2][CFLOW_N_ROLES];
    memcpy(blocks, model->weights.blocks, sizeof blocks);
    blocks[1][CFLOW_EXPERT_GATE].n_stripes = 1 << 13;
    blocks[1][CFLOW_EXPERT_GATE].stripe_rows = 32;
    wide.weights.layers = layers;
    wide.weights.blocks = blocks;
    refused(&wide, options, "16777218 pieces of work");
    uint64_t kv, rest;
    options.max_rows = 2047;
    CHECK(cflow_ctx_memory(&kv, &rest, &wide, &options, NULL) == CFLOW_OK, "2047 rows");
}

int main(void) {
    tiny f = tiny_open();
    cflow_model *model = tiny_open_model(&f, (cflow_model_options){0}, NULL);
    if (model) {
        threads_do_not_change_bits(model);
        cancelled_steps_leave_no_trace(model);
        more_than_can_be_counted_is_refused(model);
    }
    a_router_of_nan_fails_the_row();
    cflow_model_close(model);
    printf(failed ? "step: failed\n" : "step: ok\n");
    return failed;
}
