/* The kernels with prefetch hints to the first level (the engine's), to the second, and none.
 *
 *     prefetch MIB THREADS ROUNDS
 */
#include "arms.h"

void kernels_init_avx2_none(kernels *k);
void kernels_init_avx2_t1(kernels *k);
void kernels_init_avx512vnni_none(kernels *k);
void kernels_init_avx512vnni_t1(kernels *k);

enum { COLUMN_BLOCKS = 64, N_HINTS = 3 };
static const char *const hints[N_HINTS] = {"none", "t0", "t1"};

static void compare_hints(const char *isa, void (*none)(kernels *), void (*t1)(kernels *),
                          const uint8_t *weights, const settings *set) {
    kernels k[N_HINTS];
    stream s[N_HINTS];
    arm arms[N_HINTS];
    for (int i = 0; i < N_HINTS; i++) {
        if (kernels_select(&k[i], isa) != 0) return;
        s[i] = (stream){.k = &k[i],
                        .weights = weights,
                        .n_stripes = stripes_in(set->bytes, COLUMN_BLOCKS, set->threads),
                        .n_blocks = COLUMN_BLOCKS,
                        .repeats = 1,
                        .threads = set->threads,
                        .x = new_row(COLUMN_BLOCKS * 32)};
        arms[i] = stream_arm(hints[i], &s[i]);
    }
    none(&k[0]);
    t1(&k[2]);
    compare(isa, arms, N_HINTS, set->p, set->rounds);
}

int main(int argc, char **argv) {
    const settings set = read_settings(argc, argv);
    const uint8_t *weights = new_weights(set.bytes);
    compare_hints("avx2", kernels_init_avx2_none, kernels_init_avx2_t1, weights, &set);
    compare_hints("avx512vnni", kernels_init_avx512vnni_none, kernels_init_avx512vnni_t1, weights,
                  &set);
    return 0;
}
