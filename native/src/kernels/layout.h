/* The bit layout of a stripe (docs/format.md), one value at a time: for scalar.c and the
 * dequantiser.
 *
 * `groups` is the number of groups of 16 rows in the stripe. Rows count from the stripe's first
 * row, columns from the first column of their quant block.
 */
#ifndef CFLOW_LAYOUT_H
#define CFLOW_LAYOUT_H

#include <string.h>

#include "../kernels.h"

typedef struct {
    uint32_t head;  /* bytes of a group at the start of each tile */
    uint32_t block; /* bytes of a group in each quant block */
} encoding_size;

static inline encoding_size encoding_bytes(uint32_t encoding) {
    static const encoding_size sizes[CFLOW_N_ENCODINGS] = {
        [CFLOW_F32] = {0, 2048}, [CFLOW_F16] = {0, 1024},  [CFLOW_BF16] = {0, 1024},
        [CFLOW_Q4_0] = {0, 288}, [CFLOW_Q4_1] = {0, 320},  [CFLOW_Q8_0] = {0, 544},
        [CFLOW_Q8_1] = {0, 576}, [CFLOW_Q4_K] = {64, 288}, [CFLOW_Q6_K] = {32, 416},
    };
    return encoding < CFLOW_N_ENCODINGS ? sizes[encoding] : (encoding_size){0, 0};
}

static inline uint64_t tile_bytes(uint32_t encoding, uint32_t groups) {
    const encoding_size size = encoding_bytes(encoding);
    return (uint64_t)groups * (size.head + 8 * size.block);
}

/* Offsets in a stripe: of the tile that holds quant block `block`, and of the block itself. */
static inline uint64_t tile_head(uint32_t encoding, uint32_t groups, uint32_t block) {
    return block / 8 * tile_bytes(encoding, groups);
}
static inline uint64_t block_start(uint32_t encoding, uint32_t groups, uint32_t block) {
    const encoding_size size = encoding_bytes(encoding);
    return tile_head(encoding, groups, block) +
           (uint64_t)groups * (size.head + block % 8 * size.block);
}

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float widen_f16(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 0) { /* zero and the subnormals: fraction * 2^-24, exact */
        return float_of_bits(sign | bits_of_float((float)fraction * 0x1p-24f));
    }
    if (exponent == 31) { /* a NaN becomes quiet, as in hardware */
        return float_of_bits(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
    }
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}
static inline float widen_bf16(uint16_t half) {
    return float_of_bits((uint32_t)half << 16);
}

static inline uint16_t u16_at(const uint8_t *base, size_t index) {
    uint16_t value;
    memcpy(&value, base + 2 * index, 2);
    return value;
}
static inline float f16_at(const uint8_t *base, size_t index) {
    return widen_f16(u16_at(base, index));
}
static inline float f32_at(const uint8_t *base, size_t index) {
    float value;
    memcpy(&value, base + 4 * index, 4);
    return value;
}

/* 8-bit code: byte 64 j + 4 r + c of a group is row r, column 4 j + c. */
static inline int code8(const uint8_t *codes, uint32_t row, uint32_t col) {
    return codes[row / 16 * 512 + col / 4 * 64 + row % 16 * 4 + col % 4];
}
/* 4-bit code: byte 64 v + 4 r + c of a group has column 8 v + c in its low half, 8 v + 4 + c in its
 * high half. */
static inline int code4(const uint8_t *codes, uint32_t row, uint32_t col) {
    const uint8_t byte = codes[row / 16 * 256 + col / 8 * 64 + row % 16 * 4 + col % 4];
    return col % 8 < 4 ? byte & 15 : byte >> 4;
}
/* Upper two bits of a 6-bit code: byte 64 u + 4 r + c of a group, bits 2 k and 2 k + 1, is column
 * 16 u + 4 k + c. */
static inline int code2(const uint8_t *pairs, uint32_t row, uint32_t col) {
    const uint8_t byte = pairs[row / 16 * 128 + col / 16 * 64 + row % 16 * 4 + col % 4];
    return byte >> (col % 16 / 4 * 2) & 3;
}
static inline int code6(const uint8_t *block, uint32_t groups, uint32_t row, uint32_t col) {
    return code4(block, row, col) | code2(block + groups * 256, row, col) << 4;
}
/* Index of a value of a float form in its block. */
static inline size_t float_index(uint32_t row, uint32_t col) {
    return row / 16 * 512 + col * 16 + row % 16;
}

#endif
