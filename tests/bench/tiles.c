/* The hot kernels on a few tiles, for callgrind to count: every call of `measured` is one job.
 *
 *     valgrind --tool=callgrind --toggle-collect=measured --dump-after=measured tiles
 *
 * Prints a line for each job, in the order of the calls: instruction set, what it does, its rows,
 * and the number of tiles (128 x 256), or blocks of 32 positions.
 */
#include "arms.h"

enum { TILES = 4, COLUMN_BLOCKS = 8 * TILES, MOST_ROWS = 8 };
enum { POSITION_BLOCKS = 4, HEADS = 6, HEAD_DIM = 128 };

typedef struct {
    const kernels *k;
    uint32_t encoding;
    const matmul_args *product; /* or NULL: */
    const attend_args *attention;
} job;

void measured(const job *j);

__attribute__((noinline)) void measured(const job *j) {
    if (j->product)
        j->k->matmul[j->encoding](j->product);
    else
        j->k->attend(j->attention);
}

static void multiply(const kernels *k, const char *name, uint32_t encoding, uint32_t rows,
                     const uint8_t *weights) {
    static const int32_t same_row[MOST_ROWS];
    static float y[MOST_ROWS * ROWS];
    const matmul_args args = {.stripe = weights,
                              .stripe_groups = ROWS / 16,
                              .n_groups = ROWS / 16,
                              .n_blocks = COLUMN_BLOCKS,
                              .m = rows,
                              .x = new_row(COLUMN_BLOCKS * 32),
                              .x_rows = same_row,
                              .y = y,
                              .y_ld = ROWS};
    printf("%s %s %u %d\n", k->isa, name, rows, TILES);
    measured(&(job){.k = k, .encoding = encoding, .product = &args});
}

/* Six heads that share keys and values, as in Qwen2.5-1.5B. */
static void attend(const kernels *k, const char *name, cflow_kv_type type, const uint8_t *kv) {
    static float q[HEADS * HEAD_DIM], o[HEADS * HEAD_DIM], scratch[ATTEND_SCRATCH(HEADS, HEAD_DIM)];
    static float m[HEADS], l[HEADS];
    const uint8_t *blocks[POSITION_BLOCKS];
    for (size_t i = 0; i < POSITION_BLOCKS; i++) blocks[i] = kv;
    printf("%s %s %d %d\n", k->isa, name, HEADS, POSITION_BLOCKS);
    measured(&(job){.k = k,
                    .attention = &(attend_args){.q = q,
                                                .blocks = blocks,
                                                .n_heads = HEADS,
                                                .head_dim = HEAD_DIM,
                                                .end = POSITION_BLOCKS * 32,
                                                .scale = 1,
                                                .kv_type = type,
                                                .o = o,
                                                .m = m,
                                                .l = l,
                                                .scratch = scratch}});
}

int main(void) {
    static const struct {
        const char *name;
        uint32_t encoding;
    } encodings[] = {{"q4_0", CFLOW_Q4_0},
                     {"q4_1", CFLOW_Q4_1},
                     {"q8_0", CFLOW_Q8_0},
                     {"q4_k", CFLOW_Q4_K},
                     {"q6_k", CFLOW_Q6_K}};
    static const char *const isas[] = {"scalar", "avx2"};
    const uint8_t *bytes = new_weights(1 << 20);
    for (int isa = 0; isa < 2; isa++) {
        kernels k;
        if (kernels_select(&k, isas[isa]) != 0) continue;
        for (int i = 0; i < 5; i++)
            for (uint32_t rows = 1; rows <= MOST_ROWS; rows += MOST_ROWS - 1)
                multiply(&k, encodings[i].name, encodings[i].encoding, rows, bytes);
        attend(&k, "attend_f16", CFLOW_KV_F16, bytes);
        attend(&k, "attend_q8", CFLOW_KV_Q8, bytes);
    }
    return 0;
}
