/* Shared by the benchmarks: weights in huge pages, and arms that are timed in turn.
 *
 * The speed of a machine drifts, so arms are compared round by round: each round runs every arm
 * once. Prints a line of JSON for each arm, with the rate of every round.
 */
#ifndef ARMS_H
#define ARMS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "kernels.h"
#include "pool.h"

#define FAIL(...)                                                                                  \
    do {                                                                                           \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        exit(1);                                                                                   \
    } while (0)

enum { MAX_ARMS = 8, MAX_ROUNDS = 64 };

typedef struct {
    const char *name;
    pool_fn run; /* on every thread of the pool */
    void *arg;
    double bytes; /* of weights read by one run */
} arm;

static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void print_arm(const arm *a, const char *group, int threads, const double *seconds,
                             int rounds) {
    printf("{\"group\": \"%s\", \"arm\": \"%s\", \"threads\": %d, \"gb_s\": [", group, a->name,
           threads);
    for (int r = 0; r < rounds; r++) printf("%s%.3f", r ? ", " : "", a->bytes / seconds[r] / 1e9);
    printf("]}\n");
    fflush(stdout);
}

/* Runs a round to warm up, then `rounds` that count. */
static inline void compare(const char *group, const arm *arms, int n_arms, pool *p, int rounds) {
    static double seconds[MAX_ARMS][MAX_ROUNDS];
    for (int round = -1; round < rounds; round++) {
        for (int i = 0; i < n_arms; i++) {
            const double begin = now_s();
            pool_run(p, arms[i].run, arms[i].arg);
            if (round >= 0) seconds[i][round] = now_s() - begin;
        }
    }
    for (int i = 0; i < n_arms; i++)
        print_arm(&arms[i], group, pool_threads(p), seconds[i], rounds);
}

/* A number of the command line in [low, high]. */
static inline int number(const char *text, const char *what, long low, long high) {
    char *end;
    const long value = strtol(text, &end, 10);
    if (*text == 0 || *end != 0 || value < low || value > high)
        FAIL("%s is %s: a number from %ld to %ld is wanted", what, text, low, high);
    return (int)value;
}

typedef struct {
    size_t bytes;
    pool *p;
    int threads, rounds;
} settings;

/* PROGRAM MIB THREADS ROUNDS. MIB: of weights in RAM, more than any cache holds. */
static inline settings read_settings(int argc, char **argv) {
    settings s;
    cflow_error err;
    if (argc != 4) FAIL("%s MIB THREADS ROUNDS", argv[0]);
    s.bytes = (size_t)number(argv[1], "MIB", 1, 1 << 20) << 20;
    s.threads = number(argv[2], "THREADS", 1, 1024);
    s.rounds = number(argv[3], "ROUNDS", 1, MAX_ROUNDS);
    if (pool_open(&s.p, s.threads, &err) != CFLOW_OK) FAIL("%s", err.text);
    return s;
}

/* Every byte is 0x31, a valid code and half of a valid f16 scale. Never freed. */
static inline uint8_t *new_weights(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) FAIL("no memory for %zu bytes of weights", bytes);
    madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, 0x31, bytes);
    return memory;
}

/* One row of activations, all codes 3. Never freed. */
static inline activations new_row(size_t ld) {
    float *f = calloc(ld, sizeof *f), *scale = calloc(ld / 32, sizeof *scale);
    int8_t *q = malloc(ld);
    int32_t *sum = calloc(ld / 16, sizeof *sum);
    if (!f || !scale || !q || !sum) FAIL("no memory for %zu activations", ld);
    memset(q, 3, ld);
    return (activations){.f = f, .q = q, .scale = scale, .sum = sum, .ld = ld};
}

/* ---- streaming a q4_0 matrix ---- */

enum { ROWS = 128, TILE_COLUMNS = 256 };

/* One row of x times `n_stripes` stripes of 128 rows, in halves by thread, `repeats` times. */
typedef struct {
    const kernels *k;
    const uint8_t *weights;
    uint32_t n_stripes, n_blocks; /* a multiple of the threads; blocks of 32 columns */
    const uint32_t *order;        /* (n_stripes,) order of the stripes; NULL: as they lie */
    uint32_t repeats;
    int threads;
    activations x;
} stream;

static inline size_t stream_stripe(const stream *s) {
    return stripe_bytes(CFLOW_Q4_0, ROWS, s->n_blocks * 32);
}
static inline double stream_bytes(const stream *s) {
    return (double)s->repeats * s->n_stripes * (double)stream_stripe(s);
}

static inline void multiply_stripe(const kernels *k, const uint8_t *stripe, uint32_t n_blocks,
                                   activations x, float *y) {
    k->matmul[CFLOW_Q4_0](&(matmul_args){.stripe = stripe,
                                         .stripe_groups = ROWS / 16,
                                         .n_groups = ROWS / 16,
                                         .n_blocks = n_blocks,
                                         .m = 1,
                                         .x = x,
                                         .y = y,
                                         .y_ld = ROWS});
}

static inline void run_stream(void *arg, int thread) {
    const stream *s = arg;
    const size_t bytes = stream_stripe(s);
    const uint32_t share = s->n_stripes / (uint32_t)s->threads, first = share * (uint32_t)thread;
    float y[ROWS];
    for (uint32_t repeat = 0; repeat < s->repeats; repeat++)
        for (uint32_t i = first; i < first + share; i++)
            multiply_stripe(s->k, s->weights + (s->order ? s->order[i] : i) * bytes, s->n_blocks,
                            s->x, y);
}

static inline arm stream_arm(const char *name, const stream *s) {
    return (arm){name, run_stream, (void *)s, stream_bytes(s)};
}

/* The matrix of n_blocks * 32 columns that fills `bytes`, rounded to whole shares. */
static inline uint32_t stripes_in(size_t bytes, uint32_t n_blocks, int threads) {
    const size_t share = bytes / stripe_bytes(CFLOW_Q4_0, ROWS, n_blocks * 32) / (size_t)threads;
    if (share == 0) FAIL("%zu bytes are less than a stripe for each of %d threads", bytes, threads);
    return (uint32_t)(share * (size_t)threads);
}

#endif
