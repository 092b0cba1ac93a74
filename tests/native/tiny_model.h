/* The tiny file as an open model, read through a disk whose reads and clock a test controls;
 * contexts and steps over it. */
#ifndef CFLOW_TINY_MODEL_H
#define CFLOW_TINY_MODEL_H

#include <errno.h>
#include <math.h>
#include <semaphore.h>
#include <unistd.h>

#include "expect.h"
#include "model_open.h"
#include "temporary.h"
#include "tiny_file.h"

/* ---- the disk ---- */

/* WELL: as usual; FAILS: EIO; IS_CUT: the file ends; IS_ALTERED: a wrong byte; HANGS: no answer. */

typedef enum { WELL, FAILS, IS_CUT, IS_ALTERED, HANGS } mood_kind;

typedef struct {
    atomic_int mood, n_left;          /* what happens to the next n_left reads */
    atomic_uint_fast64_t first, last; /* that begin at these offsets */
    sem_t begun, go_on;               /* HANGS: the read posts `begun` and waits for `go_on` */
    atomic_uint_fast64_t seconds;     /* the clock of timeouts, which only a test moves */
} disk;

static inline void spoil(disk *d, mood_kind mood, uint64_t first, uint64_t last, int n) {
    atomic_store(&d->mood, WELL);
    atomic_store(&d->first, first);
    atomic_store(&d->last, last);
    atomic_store(&d->n_left, n);
    atomic_store(&d->mood, mood);
}

static inline mood_kind mood_of(disk *d, uint64_t offset) {
    if (atomic_load(&d->mood) == WELL || offset < atomic_load(&d->first) ||
        offset > atomic_load(&d->last) || atomic_fetch_sub(&d->n_left, 1) <= 0)
        return WELL;
    return (mood_kind)atomic_load(&d->mood);
}

static inline ssize_t read_disk(void *arg, int fd, void *out, size_t n, off_t offset) {
    disk *d = arg;
    const mood_kind mood = mood_of(d, (uint64_t)offset);
    if (mood == IS_CUT) return 0;
    if (mood == FAILS) {
        errno = EIO;
        return -1;
    }
    if (mood == HANGS) {
        sem_post(&d->begun);
        sem_wait(&d->go_on);
    }
    const ssize_t got = pread(fd, out, n, offset);
    if (mood == IS_ALTERED && got > 0) ((uint8_t *)out)[got / 2] ^= 1;
    return got;
}

static inline double disk_now(void *arg) {
    disk *d = arg;
    return (double)atomic_load(&d->seconds);
}

/* ---- models ---- */

/* Opens a model whose file is the image, which it frees. d: the disk for records, or NULL. */
static inline cflow_status tiny_open_image(cflow_model **model, tiny_image image,
                                           cflow_model_options options, disk *d, cflow_error *err) {
    char path[64];
    const int fd = temporary_file(path);
    CHECK(write(fd, image.data, image.bytes) == (ssize_t)image.bytes, "cannot write");
    free(image.data);
    if (d) {
        sem_init(&d->begun, 0, 0);
        sem_init(&d->go_on, 0, 0);
    }
    const tier_hooks hooks = {.arg = d, .read = read_disk, .now = disk_now};
    options.path = path;
    options.n_threads = 1;
    if (!options.expert_reads) options.expert_reads = 1;
    if (options.expert_timeout_s == 0) options.expert_timeout_s = 100;
    const cflow_status status = model_open(model, &options, d ? &hooks : NULL, err);
    close(fd);
    return status;
}

/* Opens f as a model, and closes f. */
static inline cflow_model *tiny_open_model(tiny *f, cflow_model_options options, disk *d) {
    cflow_model *model = NULL;
    cflow_error err = {{0}};
    CHECK(tiny_open_image(&model, tiny_write(f), options, d, &err) == CFLOW_OK, "%s", err.text);
    tiny_close(f);
    return model;
}

/* Opening f must fail with EINVAL and this text. */
static inline void tiny_refused(tiny *f, cflow_model_options options, const char *text) {
    cflow_model *model;
    cflow_error err = {{0}};
    CHECK(tiny_open_image(&model, tiny_write(f), options, NULL, &err) == CFLOW_EINVAL,
          "%s is opened", text);
    CHECK(strstr(err.text, text), "%s", err.text);
}

/* ---- contexts and steps ---- */

enum { TINY_ROWS = 24 }; /* the most rows of a step */

/* Opens a context and binds the KV blocks to sequences 0, 1, .., max_context positions each. */
static inline cflow_ctx *tiny_open_ctx(cflow_model *model, cflow_ctx_options options) {
    cflow_ctx *ctx = NULL;
    cflow_error err = {{0}};
    options.max_rows = options.max_sequences = TINY_ROWS;
    CHECK(cflow_ctx_open(&ctx, model, &options, &err) == CFLOW_OK, "%s", err.text);
    const int32_t n = (options.max_context + CFLOW_KV_BLOCK - 1) / CFLOW_KV_BLOCK;
    for (int32_t first = 0; first + n <= options.n_kv_blocks; first += n) {
        int32_t blocks[TINY_ROWS];
        for (int32_t i = 0; i < n; i++) blocks[i] = first + i;
        CHECK(cflow_ctx_bind(ctx, first / n, blocks, n, &err) == CFLOW_OK, "%s", err.text);
    }
    return ctx;
}

typedef struct {
    float logits[TINY_ROWS][TINY_VOCAB];
    int32_t status[TINY_ROWS];
    cflow_score scores[TINY_ROWS];
} answer;

/* Runs a step. Rows without logits or score get zeros, so that whole answers can be compared. */
static inline cflow_status tiny_step(cflow_ctx *ctx, const cflow_row *rows, int32_t n,
                                     answer *out) {
    memset(out, 0, sizeof *out);
    const cflow_status status = cflow_ctx_step(ctx, rows, n, out->status, out->scores, NULL);
    for (int32_t i = 0; i < n; i++)
        if (cflow_ctx_logits(ctx, i))
            memcpy(out->logits[i], cflow_ctx_logits(ctx, i), sizeof out->logits[i]);
    return status;
}

/* Checks that row i, with LOGITS and SCORE, has failed with this status and text. */
static inline void row_has_failed(cflow_ctx *ctx, const answer *got, int32_t i, cflow_status status,
                                  const char *text) {
    const cflow_score *score = &got->scores[i];
    const cflow_pick pick = {.row = i, .n_top = -1, .top_p = 1, .repetition_penalty = 1};
    cflow_choice choice;
    cflow_error err;
    CHECK(got->status[i] == (int32_t)status, "%s: row %d has status %d", text, i, got->status[i]);
    CHECK(!cflow_ctx_logits(ctx, i), "row %d keeps logits", i);
    CHECK(cflow_ctx_sample(ctx, &pick, 1, &choice, NULL) == CFLOW_EINVAL, "row %d is sampled", i);
    CHECK(score->token == -1 && isnan(score->logprob) && !score->n_top, "row %d is scored", i);
    cflow_ctx_row_error(ctx, i, &err);
    CHECK(!strcmp(err.text, text), "row %d: %s", i, err.text);
}

typedef struct {
    disk *d;
    cflow_ctx *ctx;
} cancellation;

/* A thread: cancels the step once a read hangs. */
static inline void *cancel_once_reading(void *arg) {
    const cancellation *c = arg;
    sem_wait(&c->d->begun);
    cflow_ctx_cancel(c->ctx);
    return NULL;
}

#endif
