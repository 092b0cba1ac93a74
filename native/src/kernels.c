/* What does not depend on the instruction set: sizes, the dequantiser, checksums, and the choice of
 * a table. */
#include "kernels.h"

#include "kernels/layout.h"

uint32_t n_column_blocks(uint32_t encoding, uint32_t n_cols) {
    const uint32_t blocks = (uint32_t)(((uint64_t)n_cols + 31) / 32);
    const int by_tile = encoding == CFLOW_Q4_K || encoding == CFLOW_Q6_K;
    return by_tile ? (blocks + 7) / 8 * 8 : blocks;
}

uint64_t stripe_bytes(uint32_t encoding, uint32_t stripe_rows, uint32_t n_cols) {
    const encoding_size size = encoding_bytes(encoding);
    const uint64_t blocks = n_column_blocks(encoding, n_cols);
    const uint64_t group_bytes = blocks / 8 * size.head + blocks * size.block;
    return stripe_rows / 16 * group_bytes;
}

/* One value: row r of the stripe, column c of a quant block that begins at `block`, in a tile that
 * begins at `head`. */
static float value_at(uint32_t encoding, const uint8_t *head, const uint8_t *block, uint32_t groups,
                      uint32_t r, uint32_t c) {
    const uint8_t *after4 = block + (size_t)groups * 256;
    const uint8_t *after8 = block + (size_t)groups * 512;
    const uint8_t *after6 = block + (size_t)groups * 384;
    const uint32_t rows = groups * 16;
    switch (encoding) {
    case CFLOW_F32:
        return f32_at(block, float_index(r, c));
    case CFLOW_F16:
        return f16_at(block, float_index(r, c));
    case CFLOW_BF16:
        return widen_bf16(u16_at(block, float_index(r, c)));
    case CFLOW_Q4_0:
        return f16_at(after4, r) * (float)(code4(block, r, c) - 8);
    case CFLOW_Q4_1:
        return f16_at(after4, r) * (float)code4(block, r, c) + f16_at(after4, rows + r);
    case CFLOW_Q8_0:
        return f16_at(after8, r) * (float)(code8(block, r, c) - 128);
    case CFLOW_Q8_1:
        return f16_at(after8, r) * (float)(code8(block, r, c) - 128) + f16_at(after8, rows + r);
    case CFLOW_Q4_K:
        return f16_at(head, r) * (float)after4[r] * (float)code4(block, r, c) -
               f16_at(head, rows + r) * (float)after4[rows + r];
    case CFLOW_Q6_K:
        return f16_at(head, r) * (float)(int8_t)after6[c / 16 * rows + r] *
               (float)(code6(block, groups, r, c) - 32);
    default:
        return 0;
    }
}

void stripe_row(uint32_t encoding, const uint8_t *stripe, uint32_t stripe_rows, uint32_t n_cols,
                uint32_t row, float *out) {
    const uint32_t groups = stripe_rows / 16;
    for (uint32_t col = 0; col < n_cols; col++) {
        const uint8_t *head = stripe + tile_head(encoding, groups, col / 32);
        const uint8_t *block = stripe + block_start(encoding, groups, col / 32);
        out[col] = value_at(encoding, head, block, groups, row, col % 32);
    }
}

/* Each level needs several CPU features. __builtin_cpu_supports also checks that the operating
 * system saves the registers. */
static int has_avx2(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("sse4.2");
#else
    return 0;
#endif
}

static int has_avx512vnni(void) {
#if defined(__x86_64__)
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return 0;
#endif
}

const char *cflow_best_isa(void) {
    return has_avx512vnni() ? "avx512vnni" : has_avx2() ? "avx2" : "scalar";
}

int kernels_select(kernels *k, const char *isa) {
    static const char *const ladder[] = {"scalar", "avx2", "avx512vnni"};
    const int highest = has_avx512vnni() ? 2 : has_avx2() ? 1 : 0;
    int level = highest;
    if (isa != NULL) {
        for (level = 0; level <= highest && strcmp(isa, ladder[level]) != 0;) level++;
        if (level > highest) return -1;
    }
    kernels_init_scalar(k);
#if defined(__x86_64__)
    if (level >= 1) kernels_init_avx2(k);
    if (level >= 2) kernels_init_avx512vnni(k);
#endif
    k->isa = ladder[level];
    return 0;
}

uint32_t crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1) {
        if (a >> 31) product ^= b;
        b = b & 1 ? b >> 1 ^ 0x82f63b78u : b >> 1;
    }
    return product;
}

/* Appending n bytes multiplies the CRC of what is before them by x^(8 n). */
uint32_t crc_join(uint32_t first, uint32_t second, uint64_t second_bytes) {
    uint32_t power = 1u << 23; /* x^8 */
    for (uint64_t n = second_bytes; n; n >>= 1) {
        if (n & 1) first = crc_multiply(power, first);
        power = crc_multiply(power, power);
    }
    return first ^ second;
}

uint32_t cflow_crc32c(uint32_t crc, const void *data, size_t bytes) {
    kernels k;
    kernels_select(&k, NULL);
    return k.crc32c(crc, data, bytes);
}
