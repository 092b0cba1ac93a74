/* How fast each instruction set multiplies a q4_0 matrix with one row, out of L2 and out of RAM.
 *
 *     kernels MIB THREADS ROUNDS
 */
#include "arms.h"

enum { COLUMN_BLOCKS = 64, L2_STRIPES = 2, SCALAR_SHARE = 32 };

/* The scalar kernel reads a small part of the matrix: it is far slower than memory. */
static uint32_t share_of(const kernels *k) {
    return strcmp(k->isa, "scalar") == 0 ? SCALAR_SHARE : 1;
}

static stream in_l2(const kernels *k, const settings *set, const uint8_t *weights) {
    const uint32_t stripes = L2_STRIPES * (uint32_t)set->threads;
    const uint32_t times = stripes_in(set->bytes, COLUMN_BLOCKS, set->threads) / stripes;
    return (stream){.k = k,
                    .weights = weights,
                    .n_stripes = stripes,
                    .n_blocks = COLUMN_BLOCKS,
                    .repeats = times / share_of(k) + 1,
                    .threads = set->threads,
                    .x = new_row(COLUMN_BLOCKS * 32)};
}

static stream in_ram(const kernels *k, const settings *set, const uint8_t *weights) {
    stream s = in_l2(k, set, weights);
    s.n_stripes = stripes_in(set->bytes / share_of(k), COLUMN_BLOCKS, set->threads);
    s.repeats = 1;
    return s;
}

int main(int argc, char **argv) {
    static const char *const isas[] = {"scalar", "avx2", "avx512vnni"};
    enum { N = 3 };
    kernels k[N];
    stream l2[N], ram[N];
    arm l2_arms[N], ram_arms[N];
    int n = 0;
    const settings set = read_settings(argc, argv);
    const uint8_t *weights = new_weights(set.bytes);
    for (int i = 0; i < N; i++) {
        if (kernels_select(&k[n], isas[i]) != 0) continue;
        l2[n] = in_l2(&k[n], &set, weights);
        ram[n] = in_ram(&k[n], &set, weights);
        l2_arms[n] = stream_arm(isas[i], &l2[n]);
        ram_arms[n] = stream_arm(isas[i], &ram[n]);
        n++;
    }
    compare("l2", l2_arms, n, set.p, set.rounds);
    compare("ram", ram_arms, n, set.p, set.rounds);
    return 0;
}
