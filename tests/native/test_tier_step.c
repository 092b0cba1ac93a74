/* Steps over experts on disk: the same bits as with all of them in memory, exact counts, and faults
 * that affect only the rows that chose the expert. */
#include <pthread.h>
#include <sched.h>

#include "ctx.h"
#include "tiny_model.h"

enum {
    N_ROWS = 16, /* sequence i / 2, position i % 2 */
    N_SEQUENCES = N_ROWS / 2,
    N_STEPS = 24,
    TOP_K = 2
};

/* expert -1: all experts */
static void set_mood(disk *d, const cflow_model *model, mood_kind mood, int expert) {
    const uint64_t bank = model->weights.header.sections[CFLOW_SECTION_EXPERT_BANK].offset;
    const uint64_t at = expert < 0 ? 0 : bank + model->weights.records[expert].offset;
    spoil(d, mood, at, expert < 0 ? UINT64_MAX : at, INT32_MAX);
}

/* ---- models and contexts ---- */

/* slots 0: all experts in memory. */
static cflow_model *open_model(int slots, cflow_model_options options, disk *d) {
    tiny f = tiny_open();
    options.expert_cache = (uint64_t)slots * f.records[1].offset;
    return tiny_open_model(&f, options, d);
}

static cflow_ctx *open_ctx(cflow_model *model, int n_threads) {
    return tiny_open_ctx(model, (cflow_ctx_options){.n_threads = n_threads,
                                                    .max_context = 32,
                                                    .n_kv_blocks = N_SEQUENCES,
                                                    .keep_values = 1});
}

/* ---- steps ---- */

static cflow_status run_prompt(cflow_ctx *ctx, answer *out) {
    cflow_row rows[N_ROWS];
    for (int32_t i = 0; i < N_ROWS; i++)
        rows[i] = (cflow_row){.sequence = i / 2,
                              .token = i * 5 % TINY_TOKENS,
                              .position = i % 2,
                              .flags = CFLOW_ROW_LOGITS | CFLOW_ROW_SCORE,
                              .target = i,
                              .n_top = 1};
    return tiny_step(ctx, rows, N_ROWS, out);
}

/* Runs a step of one row, the i-th token. */
static void run_token(cflow_ctx *ctx, int32_t i, float logits[TINY_VOCAB]) {
    int32_t status;
    cflow_error err = {{0}};
    const cflow_row row = {.sequence = i % N_SEQUENCES,
                           .token = i * 7 % TINY_TOKENS,
                           .position = 2 + i / N_SEQUENCES,
                           .flags = CFLOW_ROW_LOGITS};
    CHECK(cflow_ctx_step(ctx, &row, 1, &status, NULL, &err) == CFLOW_OK, "%s", err.text);
    CHECK(status == CFLOW_OK, "row status %d", status);
    memcpy(logits, cflow_ctx_logits(ctx, 0), TINY_VOCAB * sizeof *logits);
}

typedef struct {
    answer prompt;
    float logits[N_STEPS][TINY_VOCAB];
} answers;

static void run(cflow_ctx *ctx, answers *out) {
    memset(out, 0, sizeof *out);
    CHECK(run_prompt(ctx, &out->prompt) == CFLOW_OK, "step");
    for (int32_t i = 0; i < N_STEPS; i++) run_token(ctx, i, out->logits[i]);
}

/* The answers with all experts in memory, and which experts each row of the prompt and each token
 * choose. */
static answers want;
static unsigned prompt_experts[N_ROWS], token_experts[N_STEPS]; /* bit sets */

static unsigned chosen_experts(const cflow_ctx *ctx, int32_t row) {
    float ids[TOP_K];
    int32_t n;
    cflow_error err = {{0}};
    unsigned set = 0;
    CHECK(cflow_ctx_value(ctx, "L1.routed", row, ids, TOP_K, &n, &err) == CFLOW_OK, "%s", err.text);
    for (int i = 0; i < TOP_K; i++) set |= 1u << (unsigned)ids[i];
    return set;
}

static void run_in_memory(void) {
    cflow_model *model = open_model(0, (cflow_model_options){0}, NULL);
    cflow_ctx *ctx = open_ctx(model, 1);
    CHECK(run_prompt(ctx, &want.prompt) == CFLOW_OK, "step");
    for (int32_t i = 0; i < N_ROWS; i++) prompt_experts[i] = chosen_experts(ctx, i);
    for (int32_t i = 0; i < N_STEPS; i++) {
        run_token(ctx, i, want.logits[i]);
        token_experts[i] = chosen_experts(ctx, 0);
    }
    CHECK(!cflow_ctx_usage(ctx), "usage without an expert cache");
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

static void same_bits(cflow_model *model, int n_threads, const char *what) {
    answers got;
    cflow_ctx *ctx = open_ctx(model, n_threads);
    run(ctx, &got);
    CHECK(!memcmp(&want, &got, sizeof got), "%s, %d threads: other bits", what, n_threads);
    cflow_ctx_close(ctx);
}

/* ---- bits ---- */

static void budgets_do_not_change_bits(void) {
    for (int slots = 2; slots <= TINY_EXPERTS; slots++)
        for (int i = 0; i < 6; i++) {
            const int io = i % 2 ? CFLOW_IO_CACHED : CFLOW_IO_DIRECT, window = i / 2;
            cflow_model *model = open_model(
                slots, (cflow_model_options){.expert_io = io, .expert_window = window}, NULL);
            for (int n_threads = 1; n_threads <= 16; n_threads *= 4)
                same_bits(model, n_threads, "on disk");
            cflow_tier_stats s;
            cflow_model_tier(model, &s);
            CHECK(s.n_slots == (uint32_t)slots && s.n_records == TINY_EXPERTS, "%u slots of %u",
                  s.n_slots, s.n_records);
            CHECK(io == CFLOW_IO_DIRECT || !s.direct_io, "direct reads");
            cflow_model_close(model);
        }
}

static void *run_ten_times(void *arg) {
    for (int i = 0; i < 10; i++) same_bits(arg, 2, "beside another context");
    return NULL;
}

static void contexts_share_the_cache(void) {
    cflow_model *model = open_model(2, (cflow_model_options){0}, NULL);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, run_ten_times, model);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    cflow_model_close(model);
}

static void without_a_window_there_is_one_context(void) {
    const cflow_model_options options = {.expert_window = CFLOW_WINDOW_NONE};
    cflow_model *model = open_model(2, options, NULL);
    cflow_ctx *ctx = open_ctx(model, 1), *other;
    cflow_error err = {{0}};
    CHECK(cflow_ctx_open(&other, model, &ctx->options, &err) == CFLOW_EINVAL && !other, "two");
    CHECK(strstr(err.text, "expert_window NONE has one context"), "%s", err.text);
    cflow_ctx_close(ctx);
    same_bits(model, 1, "one after the other");
    cflow_model_close(model);
}

/* CFLOW_WINDOW_NONE: a step pins as many records as leave a slot to each read that may hang; all,
 * if each record has its own slot. */
static void what_is_pinned_leaves_slots_to_hang(void) {
    for (int slots = 2; slots <= TINY_EXPERTS; slots++)
        for (int n_reads = 1; n_reads <= 64; n_reads += n_reads < 8 ? 1 : 28) {
            if (slots < TINY_EXPERTS && slots < n_reads + 1) continue; /* refused */
            const cflow_model_options options = {.expert_reads = n_reads,
                                                 .expert_window = CFLOW_WINDOW_NONE};
            cflow_model *model = open_model(slots, options, NULL);
            const int most = slots == TINY_EXPERTS ? TINY_EXPERTS : slots - n_reads;
            CHECK(model->most_pinned == (uint32_t)most, "%d slots, %d reads: %u pinned", slots,
                  n_reads, model->most_pinned);
            same_bits(model, 2, "without a window");
            cflow_model_close(model);
        }
}

/* ---- usage ---- */

static int count_bits(unsigned set) {
    return __builtin_popcount(set);
}

/* Two slots hold exactly the two experts of the token before, so the misses of a token are known.
 */
static void a_token_pays_for_its_misses_alone(void) {
    cflow_model *model = open_model(2, (cflow_model_options){0}, NULL);
    cflow_ctx *ctx = open_ctx(model, 2);
    float logits[TINY_VOCAB];
    cflow_tier_stats before, after;
    cflow_plan_info plan;
    answer prompt;
    cflow_model_plan(model, &plan);
    CHECK(run_prompt(ctx, &prompt) == CFLOW_OK, "step");
    run_token(ctx, 0, logits);
    const uint64_t page = 4096, record = (model->weights.records[0].bytes + page - 1) / page * page;
    for (int32_t i = 1; i < N_STEPS; i++) {
        cflow_model_tier(model, &before);
        const uint64_t read_before = cflow_ctx_read_bytes(ctx);
        run_token(ctx, i, logits);
        cflow_model_tier(model, &after);
        const unsigned missed = token_experts[i] & ~token_experts[i - 1];
        const uint64_t n_misses = (uint64_t)count_bits(missed);
        const cflow_row_usage *usage = cflow_ctx_usage(ctx);
        CHECK(usage->expert_misses == n_misses && usage->expert_hits == TOP_K - n_misses,
              "token %d: %u misses, %u hits", i, usage->expert_misses, usage->expert_hits);
        CHECK(usage->disk_bytes == n_misses * record, "token %d: %llu bytes", i,
              (unsigned long long)usage->disk_bytes);
        CHECK(after.disk_bytes - before.disk_bytes == n_misses * record, "token %d: read %llu", i,
              (unsigned long long)(after.disk_bytes - before.disk_bytes));
        CHECK(n_misses || !usage->stall_ns, "token %d stalls without a miss", i);
        CHECK(cflow_ctx_read_bytes(ctx) - read_before == plan.bytes_per_token,
              "token %d: weights streamed", i);
    }
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

/* An expert is charged to the first row that chose it. */
static void first_rows_pay_for_shared_reads(void) {
    cflow_model *model = open_model(TINY_EXPERTS, (cflow_model_options){0}, NULL);
    cflow_ctx *ctx = open_ctx(model, 2);
    answer got;
    for (int round = 0; round < 2; round++) {
        CHECK(run_prompt(ctx, &got) == CFLOW_OK, "step");
        unsigned seen = 0;
        for (int32_t i = 0; i < N_ROWS; i++) {
            const cflow_row_usage *usage = &cflow_ctx_usage(ctx)[i];
            const uint32_t n = (uint32_t)count_bits(prompt_experts[i] & ~seen);
            seen |= prompt_experts[i];
            CHECK(usage->expert_misses == (round ? 0 : n) && usage->expert_hits == (round ? n : 0),
                  "round %d, row %d: %u misses, %u hits", round, i, usage->expert_misses,
                  usage->expert_hits);
        }
    }
    uint64_t uses[TINY_EXPERTS], n = 0;
    cflow_model_expert_uses(model, uses);
    unsigned all = 0;
    for (int i = 0; i < N_ROWS; i++) all |= prompt_experts[i];
    for (int e = 0; e < TINY_EXPERTS; e++) n += uses[e];
    CHECK(n == 2 * (uint64_t)count_bits(all), "%llu uses", (unsigned long long)n);
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

static void a_warm_start_leaves_nothing_to_miss(void) {
    cflow_model *model = open_model(2, (cflow_model_options){0}, NULL);
    uint64_t uses[TINY_EXPERTS] = {0};
    for (int e = 0; e < TINY_EXPERTS; e++)
        if (token_experts[0] >> e & 1) uses[e] = 5;
    cflow_error err = {{0}};
    CHECK(cflow_model_warm(model, uses, NULL, &err) == CFLOW_OK, "%s", err.text);
    cflow_ctx *ctx = open_ctx(model, 1);
    const cflow_row row = {.flags = CFLOW_ROW_LOGITS, .position = 2};
    int32_t status;
    CHECK(cflow_ctx_step(ctx, &row, 1, &status, NULL, &err) == CFLOW_OK, "%s", err.text);
    const unsigned chosen = chosen_experts(ctx, 0);
    CHECK(cflow_ctx_usage(ctx)->expert_hits == (uint32_t)count_bits(chosen & token_experts[0]),
          "%u hits", cflow_ctx_usage(ctx)->expert_hits);
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

/* ---- faults ---- */

/* Whether row i fails with the expert: it, or the row before it in its sequence, chose it. */
static int is_hit(int32_t i, int expert) {
    const unsigned set = prompt_experts[i] | (i % 2 ? prompt_experts[i - 1] : 0);
    return set >> expert & 1;
}

static void check_spoilt_prompt(cflow_ctx *ctx, const answer *got, int expert, cflow_status status,
                                const char *text) {
    int n_failed = 0;
    for (int32_t i = 0; i < N_ROWS; i++) {
        if (is_hit(i, expert)) {
            n_failed++;
            row_has_failed(ctx, got, i, status, text);
            continue;
        }
        cflow_error err;
        CHECK(got->status[i] == CFLOW_OK, "%s: row %d has status %d", text, i, got->status[i]);
        cflow_ctx_row_error(ctx, i, &err);
        CHECK(!*err.text, "row %d: %s", i, err.text);
        CHECK(!memcmp(got->logits[i], want.prompt.logits[i], sizeof got->logits[i]),
              "%s: row %d has other logits", text, i);
        CHECK(!memcmp(&got->scores[i], &want.prompt.scores[i], sizeof got->scores[i]),
              "%s: row %d has another score", text, i);
    }
    CHECK(n_failed && n_failed < N_ROWS, "%s: %d rows failed", text, n_failed);
}

/* Later steps are right, and no pin or demand is left: two slots suffice again. */
static void a_fault_fails_the_rows_that_need_it(mood_kind mood, cflow_status status,
                                                const char *text) {
    for (int expert = 0; expert < TINY_EXPERTS; expert++)
        for (int n_threads = 1; n_threads <= 4; n_threads *= 4) {
            disk d = {0};
            cflow_model *model = open_model(2, (cflow_model_options){0}, &d);
            set_mood(&d, model, mood, expert);
            cflow_ctx *ctx = open_ctx(model, n_threads);
            answer got;
            char named[128];
            snprintf(named, sizeof named, "layer 1, expert %d: %s", expert, text);
            for (int round = 0; round < 2; round++) {
                CHECK(run_prompt(ctx, &got) == CFLOW_OK, "step");
                check_spoilt_prompt(ctx, &got, expert, status, named);
            }
            cflow_tier_stats s;
            cflow_model_tier(model, &s);
            const uint64_t n = mood == FAILS    ? s.failed_io
                               : mood == IS_CUT ? s.failed_cut
                                                : s.failed_altered;
            CHECK(n == 2, "%llu failed", (unsigned long long)n);
            set_mood(&d, model, WELL, -1);
            cflow_ctx_close(ctx);
            same_bits(model, n_threads, "after a fault");
            cflow_model_close(model);
        }
}

static void every_expert_may_fail(void) {
    disk d = {0};
    cflow_model *model = open_model(2, (cflow_model_options){0}, &d);
    set_mood(&d, model, FAILS, -1);
    cflow_ctx *ctx = open_ctx(model, 2);
    answer got;
    CHECK(run_prompt(ctx, &got) == CFLOW_OK, "step");
    for (int32_t i = 0; i < N_ROWS; i++) CHECK(got.status[i] == CFLOW_EIO, "%d", got.status[i]);
    set_mood(&d, model, WELL, -1);
    cflow_ctx_close(ctx);
    same_bits(model, 2, "after all failed");
    cflow_model_close(model);
}

typedef struct {
    disk *d;
    const cflow_model *model;
} impatience;

/* A thread: makes the read that hangs, and no other, time out. It moves the clock once all demanded
 * records but that one have been read: the step then waits for it alone, and demands no more. */
static void *let_time_pass(void *arg) {
    const impatience *i = arg;
    cflow_tier_stats s;
    sem_wait(&i->d->begun);
    do {
        sched_yield();
        cflow_model_tier(i->model, &s);
    } while (s.reads + 1 < s.misses + s.extra_reads);
    atomic_fetch_add(&i->d->seconds, 1);
    return NULL;
}

/* Three slots, two threads: a read that hangs holds one of each, the others do the work. */
static void a_disk_that_hangs_fails_the_rows_that_need_it(cflow_window window) {
    static disk disks[3]; /* a read may outlive its model */
    disk *d = &disks[window];
    int expert = 0;
    while (!is_hit(0, expert)) expert++;
    const cflow_model_options options = {
        .expert_reads = 2, .expert_timeout_s = 0.05, .expert_window = (int32_t)window};
    cflow_model *model = open_model(3, options, d);
    set_mood(d, model, HANGS, expert);
    cflow_ctx *ctx = open_ctx(model, 2);
    answer got;
    char text[64];
    snprintf(text, sizeof text, "layer 1, expert %d: the disk did not answer in time", expert);
    impatience impatient = {d, model};
    pthread_t thread;
    pthread_create(&thread, NULL, let_time_pass, &impatient);
    for (int round = 0; round < 2; round++) {
        CHECK(run_prompt(ctx, &got) == CFLOW_OK, "step");
        check_spoilt_prompt(ctx, &got, expert, CFLOW_EIO, text);
    }
    pthread_join(thread, NULL);
    cflow_tier_stats s;
    cflow_model_tier(model, &s);
    CHECK(s.failed_timed_out && s.n_overdue == 1, "%llu timed out, %u overdue",
          (unsigned long long)s.failed_timed_out, s.n_overdue);
    set_mood(d, model, WELL, -1);
    sem_post(&d->go_on);
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

/* A cancelled step returns although the disk does not answer. */
static void a_wait_can_be_cancelled(void) {
    disk d = {0};
    cflow_model *model = open_model(2, (cflow_model_options){0}, &d);
    cflow_ctx *ctx = open_ctx(model, 2);
    for (int round = 0; round < 8; round++) {
        set_mood(&d, model, HANGS, -1);
        cancellation cancel = {&d, ctx};
        pthread_t thread;
        pthread_create(&thread, NULL, cancel_once_reading, &cancel);
        answer got;
        const cflow_status status = run_prompt(ctx, &got);
        CHECK(status == CFLOW_ECANCELLED, "status %d", status);
        pthread_join(thread, NULL);
        set_mood(&d, model, WELL, -1);
        sem_post(&d.go_on);
        same_bits(model, 2, "after a cancelled wait");
        CHECK(run_prompt(ctx, &got) == CFLOW_OK, "step");
        CHECK(!memcmp(&got, &want.prompt, sizeof got), "other bits after a cancelled wait");
        cflow_ctx_close(ctx);
        cflow_model_close(model); /* so that the next round begins with an empty cache */
        model = open_model(2, (cflow_model_options){0}, &d);
        ctx = open_ctx(model, 2);
    }
    cflow_ctx_close(ctx);
    cflow_model_close(model);
}

/* ---- the rest ---- */

static void single_records_can_be_looked_at(void) {
    cflow_model *memory = open_model(0, (cflow_model_options){0}, NULL);
    disk d = {0};
    cflow_model *model = open_model(2, (cflow_model_options){0}, &d);
    uint32_t t = 0;
    while (model->weights.tensors[t].role != CFLOW_EXPERT_UP) t++;
    float in_memory[4 * TINY_D], on_disk[4 * TINY_D];
    cflow_error err = {{0}};
    for (uint32_t e = 0; e < TINY_EXPERTS; e++) {
        CHECK(cflow_model_rows(memory, t, e, 3, 4, in_memory, &err) == CFLOW_OK, "%s", err.text);
        CHECK(cflow_model_rows(model, t, e, 3, 4, on_disk, &err) == CFLOW_OK, "%s", err.text);
        CHECK(!memcmp(in_memory, on_disk, sizeof on_disk), "expert %u differs", e);
    }
    set_mood(&d, model, IS_ALTERED, 0);
    CHECK(cflow_model_rows(model, t, 0, 3, 4, on_disk, &err) == CFLOW_EFORMAT, "altered");
    CHECK(strstr(err.text, "block 1 expert 0: its checksum is wrong"), "%s", err.text);
    cflow_model_close(model);
    cflow_model_close(memory);
}

static void refused(cflow_model_options options, const char *text) {
    tiny f = tiny_open();
    if (!options.expert_cache) options.expert_cache = 2 * f.records[1].offset;
    tiny_refused(&f, options, text);
    tiny_close(&f);
}

static void memory_is_weights_and_slots(void) {
    cflow_model *all = open_model(0, (cflow_model_options){0}, NULL);
    cflow_model *some = open_model(2, (cflow_model_options){0}, NULL);
    cflow_memory memory;
    cflow_model_memory(some, &memory);
    const uint64_t huge_page = 2 << 20;
    CHECK(memory.resident_bytes == some->weights.memory.bytes + huge_page, "%llu bytes",
          (unsigned long long)memory.resident_bytes);
    CHECK(!some->weights.expert_bank && some->weights.memory.used < all->weights.memory.used,
          "the bank is in memory");
    cflow_model_close(all);
    cflow_model_close(some);
}

int main(void) {
    run_in_memory();
    if (failed) return failed;
    budgets_do_not_change_bits();
    contexts_share_the_cache();
    without_a_window_there_is_one_context();
    what_is_pinned_leaves_slots_to_hang();
    a_token_pays_for_its_misses_alone();
    first_rows_pay_for_shared_reads();
    a_warm_start_leaves_nothing_to_miss();
    a_fault_fails_the_rows_that_need_it(FAILS, CFLOW_EIO, "the operating system failed the read");
    a_fault_fails_the_rows_that_need_it(IS_CUT, CFLOW_EFORMAT, "the file ends inside it");
    a_fault_fails_the_rows_that_need_it(IS_ALTERED, CFLOW_EFORMAT,
                                        "its checksum is wrong: its bytes were altered");
    every_expert_may_fail();
    a_disk_that_hangs_fails_the_rows_that_need_it(CFLOW_WINDOW_DELAY);
    a_disk_that_hangs_fails_the_rows_that_need_it(CFLOW_WINDOW_NONE);
    a_wait_can_be_cancelled();
    single_records_can_be_looked_at();
    memory_is_weights_and_slots();
    refused((cflow_model_options){.expert_cache = 1}, "an expert cache of 1 bytes holds 0 records");
    refused((cflow_model_options){.as_f32 = 1}, "dequantised experts must all be in memory");
    refused((cflow_model_options){.expert_io = 7}, "expert_io is 7");
    refused((cflow_model_options){.expert_window = 3}, "expert_window is 3");
    refused((cflow_model_options){.defer_experts = 2}, "defer_experts is 2; a token has 2 experts");
    refused((cflow_model_options){.expert_reads = 65}, "65 I/O threads");
    printf(failed ? "tier step: failed\n" : "tier step: ok\n");
    return failed;
}
