/* How many products of 8-bit numbers the threads can add up in a second from registers: the upper
 * bound of any matrix product.
 *
 *     multiply THREADS ROUNDS
 */
#include <immintrin.h>

#include "arms.h"

enum { SUMS = 8, TIMES = 1 << 22 };

typedef struct {
    const char *isa;
    pool_fn run;
    int lanes; /* products of one instruction */
} unit;

/* The compiler takes the factors for new each time, so that it computes every product. */
__attribute__((target("avx2"))) static void multiply_avx2(void *arg, int thread) {
    (void)arg, (void)thread;
    __m256i w = _mm256_set1_epi8(1), x = _mm256_set1_epi8(2), sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = _mm256_setzero_si256();
    for (int n = 0; n < TIMES; n++)
        for (int i = 0; i < SUMS; i++) {
            __asm__ volatile("" : "+x"(w));
            sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(w, x));
        }
    for (int i = 0; i < SUMS; i++) __asm__ volatile("" ::"x"(sums[i]));
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) static void
multiply_avx512vnni(void *arg, int thread) {
    (void)arg, (void)thread;
    __m512i w = _mm512_set1_epi8(1), x = _mm512_set1_epi8(2), sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = _mm512_setzero_si512();
    for (int n = 0; n < TIMES; n++)
        for (int i = 0; i < SUMS; i++) {
            __asm__ volatile("" : "+v"(w));
            sums[i] = _mm512_dpbusd_epi32(sums[i], w, x);
        }
    for (int i = 0; i < SUMS; i++) __asm__ volatile("" ::"v"(sums[i]));
}

static unit best_unit(void) {
    static const unit avx2 = {"avx2", multiply_avx2, 32};
    static const unit avx512vnni = {"avx512vnni", multiply_avx512vnni, 64};
    const char *isa = cflow_best_isa();
    if (strcmp(isa, avx512vnni.isa) == 0) return avx512vnni;
    if (strcmp(isa, avx2.isa) == 0) return avx2;
    FAIL("%s: this processor has no instructions for products of 8-bit numbers", isa);
}

int main(int argc, char **argv) {
    cflow_error err;
    pool *p;
    if (argc != 3) FAIL("%s THREADS ROUNDS", argv[0]);
    const int threads = number(argv[1], "THREADS", 1, 1024);
    const int rounds = number(argv[2], "ROUNDS", 1, MAX_ROUNDS);
    if (pool_open(&p, threads, &err) != CFLOW_OK) FAIL("%s", err.text);
    const unit u = best_unit();
    double best = 0;
    for (int round = 0; round < rounds; round++) {
        const double begin = now_s();
        pool_run(p, u.run, NULL);
        const double rate = (double)threads * TIMES * SUMS * u.lanes / (now_s() - begin);
        if (rate > best) best = rate;
    }
    printf("{\"isa\": \"%s\", \"threads\": %d, \"gmac_s\": %.1f}\n", u.isa, threads, best / 1e9);
    pool_close(p);
    return 0;
}
