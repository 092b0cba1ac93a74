/* One product of a q4_0 matrix with one row, for cachegrind to count:
 *
 *     cache_misses tiled|row_major|by_tile f32|int8 COLUMNS ROWS PASSES
 *
 * Matrix and row are made first; PASSES 0 does only that. Row-major is GGML's layout: 16 bytes
 * of codes behind an f16 scale, columns 0 to 15 in the low nibbles; it is read row by row, or in
 * the order of tiles. Tiled int8 is the engine's AVX2 kernel; the engine has no product of q4_0
 * with f32 activations, so tiled f32 is plain code in the same order. Prints the sum of output i
 * times i + 1, the same for all layouts.
 */
#include <math.h>

#include "arms.h"
#include "kernels/layout.h"

enum { BLOCK = 32, Q4_0_BLOCK_BYTES = 18 };

/* The matrix; any formula will do. */
static uint8_t code(uint32_t row, uint32_t col) {
    return (uint8_t)(((row * 5 + col * 3) ^ (col >> 4)) & 15);
}
static uint16_t scale(uint32_t row, uint32_t block) {
    return (uint16_t)(0x2c00 + (row + block) % 64);
}

static void fill_tiled(uint8_t *to, uint32_t rows, uint32_t columns) {
    const uint32_t n_blocks = columns / BLOCK;
    for (uint32_t stripe = 0; stripe < rows; stripe += ROWS)
        for (uint32_t block = 0; block < n_blocks; block++) {
            for (uint32_t at = 0; at < ROWS / 16 * 256; at++) {
                const uint32_t row = stripe + at / 256 * 16 + at % 64 / 4;
                const uint32_t col = block * BLOCK + at % 256 / 64 * 8 + at % 4;
                *to++ = (uint8_t)(code(row, col) | code(row, col + 4) << 4);
            }
            for (uint32_t r = 0; r < ROWS; r++, to += 2)
                memcpy(to, &(uint16_t){scale(stripe + r, block)}, 2);
        }
}

static void fill_row_major(uint8_t *to, uint32_t rows, uint32_t columns) {
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t block = 0; block < columns / BLOCK; block++, to += Q4_0_BLOCK_BYTES) {
            memcpy(to, &(uint16_t){scale(row, block)}, 2);
            for (uint32_t i = 0; i < 16; i++) {
                const uint32_t col = block * BLOCK + i;
                to[2 + i] = (uint8_t)(code(row, col) | code(row, col + 16) << 4);
            }
        }
}

static float add_f32(const uint8_t *w, activations x, uint32_t block, float acc) {
    const float d = f16_at(w, 0), *f = x.f + block * BLOCK;
    for (uint32_t i = 0; i < 16; i++) acc += d * (float)((w[2 + i] & 15) - 8) * f[i];
    for (uint32_t i = 0; i < 16; i++) acc += d * (float)((w[2 + i] >> 4) - 8) * f[16 + i];
    return acc;
}

static float add_int8(const uint8_t *w, activations x, uint32_t block, float acc) {
    const int8_t *q = x.q + block * BLOCK;
    int32_t sum = 0;
    for (uint32_t i = 0; i < 16; i++)
        sum += ((w[2 + i] & 15) - 8) * q[i] + ((w[2 + i] >> 4) - 8) * q[16 + i];
    return fmaf((float)sum, f16_at(w, 0) * x.scale[block], acc);
}

/* Row by row (width: all blocks of a row), or as tiles are walked: `width` blocks of 128 rows. */
static void row_major(const uint8_t *w, uint32_t rows, uint32_t n_blocks, uint32_t width,
                      activations x, float *y,
                      float (*add)(const uint8_t *, activations, uint32_t, float)) {
    memset(y, 0, rows * sizeof *y);
    for (uint32_t stripe = 0; stripe < rows; stripe += ROWS)
        for (uint32_t first = 0; first < n_blocks; first += width)
            for (uint32_t row = stripe; row < stripe + ROWS; row++) {
                const uint8_t *at = w + ((size_t)row * n_blocks + first) * Q4_0_BLOCK_BYTES;
                float acc = y[row];
                for (uint32_t b = first; b < first + width; b++, at += Q4_0_BLOCK_BYTES)
                    acc = add(at, x, b, acc);
                y[row] = acc;
            }
}

/* A block of a group: 16 rows. */
static void add_group_f32(const uint8_t *codes, const uint8_t *scales, const float *f, float *acc) {
    for (uint32_t v = 0; v < 4; v++)
        for (uint32_t r = 0; r < 16; r++) {
            const uint8_t *four = codes + v * 64 + r * 4;
            const float d = f16_at(scales, r);
            for (int c = 0; c < 4; c++) acc[r] += d * (float)((four[c] & 15) - 8) * f[8 * v + c];
            for (int c = 0; c < 4; c++)
                acc[r] += d * (float)((four[c] >> 4) - 8) * f[8 * v + 4 + c];
        }
}

static void tiled_f32(const uint8_t *w, uint32_t rows, uint32_t n_blocks, activations x, float *y) {
    memset(y, 0, rows * sizeof *y);
    for (uint32_t stripe = 0; stripe < rows; stripe += ROWS)
        for (uint32_t block = 0; block < n_blocks; block++) {
            const uint8_t *scales = w + ROWS * 16;
            for (uint32_t g = 0; g < ROWS / 16; g++)
                add_group_f32(w + g * 256, scales + g * 32, x.f + block * BLOCK,
                              y + stripe + g * 16);
            w = scales + ROWS * 2;
        }
}

static void tiled_int8(const uint8_t *w, uint32_t rows, uint32_t n_blocks, activations x,
                       float *y) {
    kernels k;
    if (kernels_select(&k, "avx2") != 0) FAIL("this machine has no AVX2");
    for (uint32_t stripe = 0; stripe < rows; stripe += ROWS) {
        multiply_stripe(&k, w, n_blocks, x, y + stripe);
        w += stripe_bytes(CFLOW_Q4_0, ROWS, n_blocks * BLOCK);
    }
}

static void fill_row(activations x) {
    kernels k;
    kernels_select(&k, NULL);
    for (uint32_t i = 0; i < x.ld; i++) ((float *)x.f)[i] = (float)((int)(i * 37 % 255) - 127);
    k.quantize(x.f, (uint32_t)x.ld, (int8_t *)x.q, (float *)x.scale, (int32_t *)x.sum);
}

/* Which of the words it is; "" is none. */
static int one_of(const char *text, const char *a, const char *b, const char *c) {
    const char *const words[] = {a, b, c};
    for (int i = 0; i < 3; i++)
        if (*words[i] && strcmp(text, words[i]) == 0) return i;
    FAIL("%s is none of %s %s %s", text, a, b, c);
}

int main(int argc, char **argv) {
    if (argc != 6) FAIL("cache_misses tiled|row_major|by_tile f32|int8 COLUMNS ROWS PASSES");
    const int is_tiled = one_of(argv[1], "tiled", "row_major", "by_tile") == 0;
    const int is_f32 = one_of(argv[2], "f32", "int8", "") == 0;
    const uint32_t columns = (uint32_t)number(argv[3], "COLUMNS", 1, 1 << 20);
    const uint32_t rows = (uint32_t)number(argv[4], "ROWS", 1, 1 << 20);
    const int passes = number(argv[5], "PASSES", 0, 1000);
    if (columns % TILE_COLUMNS || rows % ROWS)
        FAIL("COLUMNS come in %ds, ROWS in %ds", TILE_COLUMNS, ROWS);
    const uint32_t n_blocks = columns / BLOCK;
    const uint32_t width = strcmp(argv[1], "by_tile") == 0 ? TILE_COLUMNS / BLOCK : n_blocks;
    uint8_t *w = new_weights((size_t)rows * n_blocks * Q4_0_BLOCK_BYTES);
    float *y = calloc(rows, sizeof *y);
    if (!y) FAIL("no memory for %u outputs", rows);
    const activations x = new_row(columns);
    fill_row(x);
    (is_tiled ? fill_tiled : fill_row_major)(w, rows, columns);
    for (int pass = 0; pass < passes; pass++) {
        if (is_tiled)
            (is_f32 ? tiled_f32 : tiled_int8)(w, rows, n_blocks, x, y);
        else
            row_major(w, rows, n_blocks, width, x, y, is_f32 ? add_f32 : add_int8);
    }
    double sum = 0;
    for (uint32_t i = 0; i < rows; i++) sum += (double)y[i] * (i + 1);
    printf("%.17g\n", sum);
    return 0;
}
