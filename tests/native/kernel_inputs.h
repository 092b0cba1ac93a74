/* For the kernel tests: a CHECK that ends the test, seeded random numbers, buffers of exact size,
 * so that AddressSanitizer sees an overrun, and the names of the instruction sets. */
#ifndef KERNEL_INPUTS_H
#define KERNEL_INPUTS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                        \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static const char *const all_isas[] = {"scalar", "avx2", "avx512vnni"};
enum { N_ISAS = 3 };

/* splitmix64 */
static inline uint32_t random_u32(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}
static inline uint32_t below(uint64_t *state, uint32_t n) {
    return random_u32(state) % n;
}
/* Uniform in [-1, 1). */
static inline float random_float(uint64_t *state) {
    return (float)random_u32(state) * 0x1p-31f - 1.0f;
}

static inline void *exact(size_t bytes) {
    void *memory = malloc(bytes ? bytes : 1);
    CHECK(memory != NULL, "%zu bytes", bytes);
    return memory;
}

/* A random number, sometimes an edge case; with `special` also NaN or infinity. */
static inline float odd_float(uint64_t *state, int special) {
    static const float edges[] = {0.0f,   -0.0f,  1e-45f,   -1e-40f,   1.1e-38f,
                                  3e38f,  -3e38f, 88.72f,   -87.4f,    -103.9f,
                                  104.5f, 0.5f,   INFINITY, -INFINITY, NAN};
    if (below(state, 8) == 0) return edges[below(state, special ? 15 : 12)];
    return random_float(state) * 8;
}

static inline int same_float(float a, float b) {
    return memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b));
}

/* Checks that the bits are equal, except that all NaNs are: hardware takes the payload of a NaN
 * from any operand. */
static inline void check_same(const float *want, const float *got, size_t n, const char *what,
                              const char *isa) {
    for (size_t i = 0; i < n; i++) {
        CHECK(same_float(want[i], got[i]), "%s %s [%zu]: %a wanted, %a got", isa, what, i,
              (double)want[i], (double)got[i]);
    }
}

#endif
