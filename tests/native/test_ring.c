/* Layers whose weights are on disk: the same bits as with all of them in memory, exact counts,
 * faults that name the layer. */
#include <pthread.h>
#include <sched.h>

#include "ctx.h"
#include "ring.h"
#include "tiny_model.h"

enum { N_LAYERS = TINY_MAX_LAYERS, N_ROWS = 8, N_STEPS = 6, N_LEAST = 2, BAD_LAYER = 6 };

/* ---- models, contexts, steps ---- */

static uint64_t slot_bytes; /* of the deep file's records */

/* slots 0: all in memory. */
static cflow_model *open_model(uint32_t slots, cflow_model_options options, disk *d) {
    tiny f = tiny_open();
    tiny_deepen(&f, N_LAYERS);
    options.weights_memory = slots * slot_bytes;
    return tiny_open_model(&f, options, d);
}

static cflow_ctx *open_ctx(cflow_model *model, int n_threads) {
    return tiny_open_ctx(
        model, (cflow_ctx_options){.n_threads = n_threads, .max_context = 32, .n_kv_blocks = 1});
}

static cflow_status run_rows(cflow_ctx *ctx, int32_t first, int32_t n, answer *out) {
    cflow_row rows[N_ROWS];
    for (int32_t i = 0; i < n; i++)
        rows[i] = (cflow_row){.token = (first + i) * 5 % TINY_TOKENS,
                              .position = first + i,
                              .flags = CFLOW_ROW_LOGITS | CFLOW_ROW_SCORE,
                              .target = i};
    return tiny_step(ctx, rows, n, out);
}

typedef struct {
    answer prompt, tokens[N_STEPS];
} answers;

static answers want;

static void run(cflow_ctx *ctx, answers *out) {
    CHECK(run_rows(ctx, 0, N_ROWS, &out->prompt) == CFLOW_OK, "step");
    for (int32_t i = 0; i < N_STEPS; i++)
        CHECK(run_rows(ctx, N_ROWS + i, 1, &out->tokens[i]) == CFLOW_OK, "step");
}

static void same_bits(cflow_model *model, int n_threads, const char *what) {
    answers got;
    cflow_ctx *ctx = open_ctx(model, n_threads);
    run(ctx, &got);
    CHECK(!memcmp(&want, &got, sizeof got), "%s, %d threads: other bits", what, n_threads);
    cflow_ctx_close(ctx);
}

static void run_in_memory(void) {
    cflow_model *model = open_model(0, (cflow_model_options){0}, NULL);
    cflow_layer_records records;
    cflow_model_layer_records(model, &records);
    CHECK(!records.n_records, "records without weights_memory");
    cflow_ctx *ctx = open_ctx(model, 1);
    run(ctx, &want);
    cflow_ctx_close(ctx);
    cflow_model_close(model);
    slot_bytes = 1 << 30;
    model = open_model(N_LAYERS, (cflow_model_options){.header_only = 1}, NULL);
    cflow_model_layer_records(model, &records);
    slot_bytes = records.slot_bytes;
    CHECK(records.n_records == N_LAYERS && records.n_kept == N_LAYERS && !records.step_bytes,
          "%u records", records.n_records);
    CHECK(records.n_least == N_LEAST && slot_bytes >= 2 * TINY_RUN && slot_bytes <= 4 * TINY_RUN,
          "at least %u of %llu bytes", records.n_least, (unsigned long long)slot_bytes);
    cflow_model_close(model);
}

static cflow_tier_stats stats_of(const cflow_model *model) {
    cflow_tier_stats s;
    cflow_model_layer_tier(model, &s);
    return s;
}

/* ---- bits and accounts ---- */

static void budgets_do_not_change_bits(void) {
    for (uint32_t slots = N_LEAST; slots <= N_LAYERS; slots += slots < 4 ? 1 : 3)
        for (int i = 0; i < 2; i++) {
            const cflow_model_options options = {
                .expert_io = i ? CFLOW_IO_CACHED : CFLOW_IO_DIRECT,
                .expert_cache = i ? 1 << 20 : 0,
            };
            cflow_model *model = open_model(slots, options, NULL);
            cflow_layer_records r;
            cflow_model_layer_records(model, &r);
            CHECK(r.n_slots == slots && r.n_kept == (slots < N_LAYERS ? slots - N_LEAST : slots),
                  "%u slots, %u kept", r.n_slots, r.n_kept);
            for (int n_threads = 1; n_threads <= 16; n_threads *= 4)
                same_bits(model, n_threads, "on disk");
            cflow_model_close(model);
        }
}

static void wait_read(const cflow_model *model) {
    for (cflow_tier_stats s = stats_of(model); s.reads < s.misses; s = stats_of(model))
        sched_yield();
}

/* A step reads each of the layers that do not stay in memory once, and nothing else. */
static void a_step_reads_what_does_not_stay(void) {
    for (uint32_t slots = N_LEAST; slots < N_LAYERS - 3; slots++) {
        cflow_model *model = open_model(slots, (cflow_model_options){0}, NULL);
        cflow_ctx *ctx = open_ctx(model, 2);
        answer got;
        CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_OK, "step");
        cflow_layer_records r;
        cflow_model_layer_records(model, &r);
        for (int32_t i = 0; i < N_STEPS; i++) {
            wait_read(model);
            const cflow_tier_stats before = stats_of(model);
            CHECK(run_rows(ctx, N_ROWS + i, 1, &got) == CFLOW_OK, "step");
            wait_read(model);
            const cflow_tier_stats after = stats_of(model);
            const cflow_row_usage *usage = cflow_ctx_usage(ctx);
            CHECK(usage->layer_reads == N_LAYERS - r.n_kept && usage->disk_bytes == r.step_bytes,
                  "%u slots: charged with %u reads of %llu bytes", slots, usage->layer_reads,
                  (unsigned long long)usage->disk_bytes);
            CHECK(after.disk_bytes - before.disk_bytes == r.step_bytes &&
                      after.misses - before.misses == N_LAYERS - r.n_kept,
                  "%u slots: read %llu bytes, want %llu", slots,
                  (unsigned long long)(after.disk_bytes - before.disk_bytes),
                  (unsigned long long)r.step_bytes);
            CHECK(!after.extra_reads, "%llu extra reads", (unsigned long long)after.extra_reads);
        }
        cflow_ctx_close(ctx);
        cflow_model_close(model);
    }
}

static void memory_is_that_of_kept_records(void) {
    cflow_model *all = open_model(0, (cflow_model_options){0}, NULL);
    cflow_model *some = open_model(3, (cflow_model_options){0}, NULL);
    const uint64_t huge_page = 2 << 20;
    cflow_memory memory;
    cflow_model_memory(some, &memory);
    CHECK(memory.resident_bytes <= some->weights.memory.bytes + 3 * slot_bytes + huge_page,
          "%llu bytes", (unsigned long long)memory.resident_bytes);
    CHECK(some->weights.memory.used + 8 * TINY_RUN < all->weights.memory.used, "%zu of %zu bytes",
          some->weights.memory.used, all->weights.memory.used);
    cflow_model_close(all);
    cflow_model_close(some);
}

/* ---- faults ---- */

static void set_mood(disk *d, const cflow_model *model, mood_kind mood, int times) {
    uint32_t i = 0;
    while (model->ring->segments[i].block != BAD_LAYER) i++;
    const uint64_t at = model->ring->records[model->ring->segments[i].record].offset;
    spoil(d, mood, at, at, times);
}

static void check_failed(cflow_ctx *ctx, const answer *got, cflow_status status, const char *text) {
    for (int32_t i = 0; i < N_ROWS; i++) row_has_failed(ctx, got, i, status, text);
}

/* Both reads fail, the one ahead and that of the step; the next step is right. */
static void a_fault_fails_the_step(mood_kind mood, cflow_status status, const char *text) {
    for (int n_threads = 1; n_threads <= 4; n_threads *= 4) {
        disk d = {0};
        cflow_model *model =
            open_model(N_LEAST, (cflow_model_options){.expert_cache = 1 << 20}, &d);
        cflow_ctx *ctx = open_ctx(model, n_threads);
        answer got;
        char named[128];
        snprintf(named, sizeof named, "layer %d: %s", BAD_LAYER, text);
        for (int round = 0; round < 3; round++) {
            set_mood(&d, model, mood, 1000);
            CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_OK, "step");
            check_failed(ctx, &got, status, named);
            set_mood(&d, model, WELL, 0);
            CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_OK, "step");
            CHECK(!memcmp(&got, &want.prompt, sizeof got), "%s: other bits after it", text);
        }
        cflow_ctx_close(ctx);
        same_bits(model, n_threads, "after a fault");
        cflow_model_close(model);
    }
}

/* The first record of a step is read before the step begins. If that read fails, the step reads it
 * again. */
static void a_failed_read_ahead_is_repeated(void) {
    disk d = {0};
    cflow_model *model = open_model(N_LEAST, (cflow_model_options){0}, &d);
    cflow_ctx *ctx = open_ctx(model, 2);
    answer got;
    CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_OK, "step");
    wait_read(model);
    const uint64_t at = model->ring->records[model->ring->uses[0].record].offset;
    spoil(&d, FAILS, at, at, 1);
    CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_OK, "step");
    while (!stats_of(model).failed_io) sched_yield();
    CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_OK, "step");
    CHECK(!memcmp(&got, &want.prompt, sizeof got), "other bits");
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

static void kept_records_are_checked(void) {
    tiny f = tiny_open();
    tiny_deepen(&f, N_LAYERS);
    tiny_image image = tiny_write(&f);
    const cflow_section bank = tiny_header(&image)->sections[CFLOW_SECTION_RESIDENT];
    uint32_t b = 2; /* a block whose last matrix shares no run with its vectors */
    while (tiny_tensor(&f, CFLOW_NORM2, b)->offset / TINY_RUN ==
           tiny_tensor(&f, CFLOW_DOWN, b)->offset / TINY_RUN)
        b++;
    image.data[bank.offset + tiny_tensor(&f, CFLOW_DOWN, b)->offset] ^= 1;
    cflow_model *model;
    cflow_error err = {{0}};
    const cflow_model_options options = {.weights_memory = N_LAYERS * slot_bytes};
    CHECK(tiny_open_image(&model, image, options, NULL, &err) == CFLOW_EFORMAT, "opened");
    char text[64];
    snprintf(text, sizeof text, "matrices of block %u: its checksum is wrong", b);
    CHECK(strstr(err.text, text), "%s", err.text);
    tiny_close(&f);
}

/* A thread: makes the read that hangs time out. It is the only one in flight. */
static void *let_time_pass(void *arg) {
    disk *d = arg;
    sem_wait(&d->begun);
    atomic_fetch_add(&d->seconds, 1);
    return NULL;
}

static void a_disk_that_hangs_fails_the_step(void) {
    static disk d; /* a read may outlive its model */
    const cflow_model_options options = {.expert_timeout_s = 0.05};
    cflow_model *model = open_model(N_LEAST, options, &d);
    cflow_ctx *ctx = open_ctx(model, 2);
    answer got;
    set_mood(&d, model, HANGS, 1);
    pthread_t thread;
    pthread_create(&thread, NULL, let_time_pass, &d);
    CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_OK, "step");
    pthread_join(thread, NULL);
    check_failed(ctx, &got, CFLOW_EIO, "layer 6: the disk did not answer in time");
    CHECK(stats_of(model).failed_timed_out && stats_of(model).n_overdue == 1, "overdue");
    sem_post(&d.go_on);
    while (stats_of(model).n_overdue) sched_yield();
    cflow_ctx_close(ctx);
    same_bits(model, 2, "after a disk that hung");
    cflow_model_close(model);
}

static void a_wait_can_be_cancelled(void) {
    disk d = {0};
    cflow_model *model = open_model(N_LEAST, (cflow_model_options){.expert_cache = 1 << 20}, &d);
    cflow_ctx *ctx = open_ctx(model, 2);
    for (int round = 0; round < 4; round++) {
        set_mood(&d, model, HANGS, 1);
        cancellation cancel = {&d, ctx};
        pthread_t thread;
        pthread_create(&thread, NULL, cancel_once_reading, &cancel);
        answer got;
        CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_ECANCELLED, "not cancelled");
        pthread_join(thread, NULL);
        sem_post(&d.go_on);
        CHECK(run_rows(ctx, 0, N_ROWS, &got) == CFLOW_OK, "step");
        CHECK(!memcmp(&got, &want.prompt, sizeof got), "other bits after a cancelled wait");
    }
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

/* ---- the rest ---- */

static void there_is_one_context(void) {
    cflow_model *model = open_model(N_LEAST, (cflow_model_options){0}, NULL);
    cflow_ctx *ctx = open_ctx(model, 1), *other;
    cflow_error err = {{0}};
    CHECK(cflow_ctx_open(&other, model, &ctx->options, &err) == CFLOW_EINVAL && !other,
          "two contexts");
    CHECK(strstr(err.text, "has one context"), "%s", err.text);
    cflow_ctx_close(ctx);
    same_bits(model, 1, "one after the other");
    ctx = open_ctx(model, 1);
    cflow_model_close(model); /* the model is closed first */
    cflow_ctx_close(ctx);
}

static void matrices_can_be_looked_at(void) {
    cflow_model *memory = open_model(0, (cflow_model_options){0}, NULL);
    cflow_model *model = open_model(N_LEAST, (cflow_model_options){0}, NULL);
    float in_memory[TINY_D_FF], on_disk[TINY_D_FF];
    cflow_error err = {{0}};
    for (uint32_t t = 0; t < model->weights.header.n_tensors; t++) {
        if (model->weights.tensors[t].role >= CFLOW_EXPERT_GATE) continue;
        CHECK(cflow_model_rows(memory, t, 0, 0, 1, in_memory, &err) == CFLOW_OK, "%s", err.text);
        CHECK(cflow_model_rows(model, t, 0, 0, 1, on_disk, &err) == CFLOW_OK, "%s", err.text);
        CHECK(!memcmp(in_memory, on_disk, 4 * model->weights.tensors[t].n_cols),
              "tensor %u differs", t);
    }
    same_bits(model, 1, "after a look");
    cflow_model_close(model);
    cflow_model_close(memory);
}

static void rejects_impossible_options(void) {
    tiny f = tiny_open();
    tiny_deepen(&f, N_LAYERS);
    const uint64_t least = N_LEAST * slot_bytes;
    char text[64];
    snprintf(text, sizeof text, "must hold 2: %llu bytes", (unsigned long long)least);
    tiny_refused(&f, (cflow_model_options){.weights_memory = least - 1}, text);
    tiny_refused(&f, (cflow_model_options){.weights_memory = least, .as_f32 = 1},
                 "dequantised weights must all be in memory");
    tiny_refused(&f, (cflow_model_options){.weights_memory = least, .expert_io = 9},
                 "expert_io is 9");
    cflow_tensor *q = (cflow_tensor *)(void *)tiny_tensor(&f, CFLOW_Q, 4);
    q->offset = tiny_tensor(&f, CFLOW_GATE, 3)->offset + 64;
    tiny_refused(&f, (cflow_model_options){.weights_memory = least}, "block 3 gate, which ends at");
    tiny_close(&f);
}

int main(void) {
    run_in_memory();
    if (failed) return failed;
    budgets_do_not_change_bits();
    a_step_reads_what_does_not_stay();
    memory_is_that_of_kept_records();
    a_fault_fails_the_step(FAILS, CFLOW_EIO, "the operating system failed the read");
    a_fault_fails_the_step(IS_CUT, CFLOW_EFORMAT, "the file ends inside it");
    a_fault_fails_the_step(IS_ALTERED, CFLOW_EFORMAT,
                           "its checksum is wrong: its bytes were altered");
    a_failed_read_ahead_is_repeated();
    kept_records_are_checked();
    a_disk_that_hangs_fails_the_step();
    a_wait_can_be_cancelled();
    there_is_one_context();
    matrices_can_be_looked_at();
    rejects_impossible_options();
    printf(failed ? "ring: failed\n" : "ring: ok\n");
    return failed;
}
