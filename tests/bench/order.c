/* The gain from weights that lie in the order in which they are used: the same products from RAM
 * with the pieces of the matrix, whole stripes or single tiles, in order and shuffled.
 *
 *     order MIB THREADS ROUNDS
 */
#include "arms.h"

enum { STRIPE_BLOCKS = 64, TILE_BLOCKS = TILE_COLUMNS / 32 };

static stream in_order(const kernels *k, const uint8_t *weights, const settings *set,
                       uint32_t n_blocks) {
    return (stream){.k = k,
                    .weights = weights,
                    .n_stripes = stripes_in(set->bytes, n_blocks, set->threads),
                    .n_blocks = n_blocks,
                    .repeats = 1,
                    .threads = set->threads,
                    .x = new_row(n_blocks * 32)};
}

static stream shuffled(const stream *s) {
    stream out = *s;
    uint32_t *order = malloc(s->n_stripes * sizeof *order);
    if (!order) FAIL("no memory for %u numbers", s->n_stripes);
    uint64_t state = 1;
    for (uint32_t i = 0; i < s->n_stripes; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint32_t at = (uint32_t)(state >> 33) % (i + 1);
        order[i] = order[at];
        order[at] = i;
    }
    out.order = order;
    return out;
}

int main(int argc, char **argv) {
    kernels k;
    const settings set = read_settings(argc, argv);
    kernels_select(&k, NULL);
    const uint8_t *weights = new_weights(set.bytes);
    const stream stripes = in_order(&k, weights, &set, STRIPE_BLOCKS);
    const stream tiles = in_order(&k, weights, &set, TILE_BLOCKS);
    const stream stripes_mixed = shuffled(&stripes), tiles_mixed = shuffled(&tiles);
    const arm arms[] = {
        stream_arm("stripes", &stripes),
        stream_arm("stripes shuffled", &stripes_mixed),
        stream_arm("tiles", &tiles),
        stream_arm("tiles shuffled", &tiles_mixed),
    };
    compare("ram", arms, sizeof arms / sizeof *arms, set.p, set.rounds);
    return 0;
}
