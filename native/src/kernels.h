/* The kernel table: one function pointer for each hot loop, filled once per context.
 *
 * Results have the same bits on every instruction set. Each entry is defined as one sequence of
 * IEEE operations, which every instruction set performs exactly; tests compare with memcmp. Only
 * the payload of a NaN may differ. fma is one multiply-add with one rounding; no other operations
 * are contracted. A lane is an index modulo 16; a 16-lane sum adds lane i + 8 to lane i, then 4, 2
 * and 1. exp is the polynomial of scalar.c, within 1 ulp.
 */
#ifndef CFLOW_KERNELS_H
#define CFLOW_KERNELS_H

#include "cflow.h"

/* The input of a product: rows of floats, or of codes quantised in blocks of 32. Rows are padded
 * with zeros to `ld` columns, a multiple of 256. */
typedef struct {
    const float *f;     /* (rows, ld) floats, for f32, f16 and bf16 matrices */
    const int8_t *q;    /* (rows, ld) codes in [-127, 127], for all other matrices */
    const float *scale; /* (rows, ld / 32) scales of the codes */
    const int32_t *sum; /* (rows, ld / 16) sums of 16 codes */
    size_t ld;
} activations;

/* y = W x for groups [first, first + n_groups) of one stripe of W and m rows of x. */
typedef struct {
    const uint8_t *stripe;  /* 64-aligned */
    uint32_t stripe_groups; /* groups of 16 rows in the stripe, even, at most 8 */
    uint32_t first;         /* even */
    uint32_t n_groups;      /* even */
    uint32_t n_blocks;      /* quant blocks of 32 columns; a multiple of 8 for the k forms */
    uint32_t m;             /* at least 1 */
    activations x;
    const int32_t *x_rows; /* (m,) which rows of x; NULL: 0 .. m - 1 */
    const int32_t *y_rows; /* (m,) which rows of y; NULL: 0 .. m - 1 */
    float *y;              /* y[y_row * y_ld + (g - first) * 16 + lane], overwritten */
    size_t y_ld;
} matmul_args;

/* Attention of one row over one KV head, which n_heads query heads share.
 * A KV block holds 32 positions of the KV head: K (head_dim, 32), then V (32, head_dim), as
 * kv_type. For q8 the f32 scales of K (32,) and of V (32,) follow the codes. */
typedef struct {
    const float *q;               /* (n_heads, head_dim), rotated, not yet scaled */
    const uint8_t *const *blocks; /* blocks[b]: positions 32 b .. 32 b + 31 */
    uint32_t n_heads, head_dim;
    uint32_t first, end; /* attends to positions first <= p < end */
    float scale;
    float cap; /* 0: none */
    cflow_kv_type kv_type;
    float *o;       /* (n_heads, head_dim) */
    float *m, *l;   /* (n_heads,) the largest score; the sum of exp(score - m) */
    float *scratch; /* ATTEND_SCRATCH(n_heads, head_dim) floats */
} attend_args;
#define ATTEND_SCRATCH(n_heads, head_dim) ((size_t)(n_heads) * ((head_dim) + 64))

typedef struct {
    const char *isa; /* "scalar", "avx2" or "avx512vnni" */

    /* Integer forms, for each output, quant block by quant block, with acc = 0 at first:
     *   isum = sum over the block of (code - bias) * x.q, exact in int32; the bias is that of
     *          cflow_encoding: 8, 128 or 32, 0 for q4_1 and q4_k
     *   q4_0 q4_1 q8_0 q8_1: acc = fma((float)isum, d * x.scale, acc)
     *   q4_1 q8_1:           then acc = fma(m, x.scale * (float)(sum of the block's 32 codes), acc)
     *   q4_k:  acc = fma((float)isum, (d * s) * x.scale, acc);
     *          acc = fma(-(dmin * t), x.scale * (float)sum32, acc)
     *   q6_k:  for each half of 16 columns: acc = fma((float)isum16, (d * s) * x.scale, acc)
     * Float forms, for each output, column by column: acc = fma(w, x.f, acc). */
    void (*matmul[CFLOW_N_ENCODINGS])(const matmul_args *args);

    /* Quantises x (n,), n a multiple of 32. For each block of 32: amax = max |x|;
     * scale = amax / 127; q = round-half-even(x * (127 / amax)), clamped to [-127, 127]. All are 0
     * if 127 / amax is infinite (amax below 3.8e-37). A block with a NaN or infinity gets scale NaN
     * and codes 0, so that the products show it. */
    void (*quantize)(const float *x, uint32_t n, int8_t *q, float *scale, int32_t *sum);

    /* acc[i % 16] = fma(x[i], x[i], acc[i % 16]), then the 16-lane sum. */
    float (*sum_squares)(const float *x, uint32_t n);
    /* y[i] = (x[i] * r) * (w[i] + offset); if w is NULL, y[i] = x[i] * r. y may be x. */
    void (*scale_weight)(const float *x, float r, const float *w, float offset, uint32_t n,
                         float *y);
    /* y[i] = x[i] + s * t[i] as one fma. y may be x. */
    void (*add_scaled)(const float *x, const float *t, float s, uint32_t n, float *y);
    /* y[i] = act(gate[i]) * up[i], or gate[i] * act(up[i]).
     *   silu(v) = v / (1 + exp(-v))
     *   gelu_tanh(v) = v / (1 + exp(-2 sqrt(2 / pi) * fma((v * v) * 0.044715, v, v)))
     *   gelu_erf(v) = (0.5 * v) * (1 + erff(v * sqrt(1 / 2))), with libm's erff */
    void (*gated)(const float *gate, const float *up, uint32_t n, cflow_activation activation,
                  int on_up, float *y);

    /* Online softmax over blocks of 32 positions in rising order:
     *   s[p] = (sum over d in order of fma(q[d], K[d][p], .)) * scale (q8: then * K scale[p]);
     *   with a cap, s = cap - (2 cap) / (1 + exp(s * (2 / cap))), which is cap * tanh(s / cap);
     *   positions outside [first, end) get -inf
     *   m' = max(m, max s); c = exp(m - m'); w[p] = exp(s[p] - m')
     *   l = fma(l, c, 16-lane sum of (w[p] + w[p+16]));
     *   o[d] = o[d] * c, then for p from first to end
     *   o[d] = fma(w[p] (q8: * V scale[p]), V[p][d], o[d])
     * and at the end o[d] / l. f16 and bf16 are widened exactly. m and l let the caller combine
     * this with the attention to other positions. */
    void (*attend)(const attend_args *args);

    /* The largest x; NaN if any is NaN; +0 for a zero of either sign. */
    float (*max)(const float *x, uint32_t n);
    /* 16-lane sum of exp(x[i] - m). */
    float (*sum_exp)(const float *x, uint32_t n, float m);
    /* y[i] = exp(x[i] - m) */
    void (*exp_shifted)(const float *x, uint32_t n, float m, float *y);

    /* As cflow_crc32c. */
    uint32_t (*crc32c)(uint32_t crc, const void *data, size_t bytes);
    /* Rounds half to even. */
    void (*f32_to_f16)(const float *x, uint32_t n, uint16_t *y);
} kernels;

/* Bytes of a stripe of n_cols columns; 0 for an unknown encoding. Does not overflow for n_cols up
 * to 2^31. */
uint64_t stripe_bytes(uint32_t encoding, uint32_t stripe_rows, uint32_t n_cols);
/* Quant blocks of 32 columns in a row of n_cols, padding to 32 columns included (to 256 for the k
 * forms). */
uint32_t n_column_blocks(uint32_t encoding, uint32_t n_cols);
/* Dequantises row `row` < stripe_rows of a stripe into out (n_cols,). */
void stripe_row(uint32_t encoding, const uint8_t *stripe, uint32_t stripe_rows, uint32_t n_cols,
                uint32_t row, float *out);

/* Product of two polynomials modulo that of CRC-32C, bit-reversed: bit 31 is x^0. */
uint32_t crc_multiply(uint32_t a, uint32_t b);
/* The CRC-32C of two pieces of data one after the other, from their CRCs and the second's length.
 */
uint32_t crc_join(uint32_t first, uint32_t second, uint64_t second_bytes);

/* Each replaces the entries that it has a faster version of; scalar fills them all. */
void kernels_init_scalar(kernels *k);
void kernels_init_avx2(kernels *k);
void kernels_init_avx512vnni(kernels *k);

/* Fills the table for an instruction set; NULL: the best one. Returns 0, or -1 if the CPU or this
 * build does not have it. */
int kernels_select(kernels *k, const char *isa);

#endif
