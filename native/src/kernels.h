/* The kernel table: one function pointer per hot loop, filled once per context.
 *
 * The same bits everywhere. Each entry defines one sequence of IEEE operations and every
 * instruction set performs exactly it, so results compare with memcmp; only which NaN it is stays
 * open. fma means one rounding; nothing else is contracted; "lane" is the index modulo 16 and a
 * 16-lane sum folds 8, 4, 2, 1 (lane i with i + 8, ...). exp is our own polynomial (scalar.c),
 * within 1 ulp.
 */
#ifndef CFLOW_KERNELS_H
#define CFLOW_KERNELS_H

#include "cflow.h"

/* Activations of a step. Columns are padded with zeros to `ld`, a multiple of 256. */
typedef struct {
    const float *f;     /* (rows, ld); read by the f32, f16 and bf16 forms */
    const int8_t *q;    /* (rows, ld) codes in [-127, 127]; read by the other forms */
    const float *scale; /* (rows, ld / 32) */
    const int32_t *sum; /* (rows, ld / 16) sums of 16 codes */
    size_t ld;
} activations;

/* A piece of a matrix: groups [first, first + n_groups) of one stripe, for some rows of x. */
typedef struct {
    const uint8_t *stripe;  /* its first byte, 64-aligned */
    uint32_t stripe_groups; /* groups of 16 rows in the stripe, even, at most 8 */
    uint32_t first;         /* even */
    uint32_t n_groups;      /* even */
    uint32_t n_blocks;      /* blocks of 32 columns; a multiple of 8 for the k forms */
    uint32_t m;             /* rows of x, at least 1 */
    activations x;
    const int32_t *x_rows; /* (m,) rows of x; NULL: 0 .. m-1 */
    const int32_t *y_rows; /* (m,) rows of y; NULL: 0 .. m-1 */
    float *y;              /* y[y_row * y_ld + (g - first) * 16 + lane], overwritten */
    size_t y_ld;
} matmul_args;

/* One KV head's part of attention for one row: `n_heads` query heads share K and V.
 * A KV block holds 32 positions of one KV head: K (head_dim, 32) then V (32, head_dim), of kv_type;
 * q8 adds f32 scales K (32,) then V (32,) behind the codes. */
typedef struct {
    const float *q;               /* (n_heads, head_dim), already rotated, not scaled */
    const uint8_t *const *blocks; /* blocks[b]: this head's positions 32 b .. 32 b + 31 */
    uint32_t n_heads, head_dim;
    uint32_t first, end; /* positions attended: first <= p < end */
    float scale;
    cflow_kv_type kv_type;
    float *o;       /* (n_heads, head_dim) */
    float *m, *l;   /* (n_heads,) the largest score, the sum of exp(score - m) */
    float *scratch; /* ATTEND_SCRATCH(n_heads, head_dim) floats */
} attend_args;
#define ATTEND_SCRATCH(n_heads, head_dim) ((size_t)(n_heads) * ((head_dim) + 64))

typedef struct {
    const char *isa;

    /* Integer forms, per output and in block order, acc from 0:
     *   isum = sum over the block of code * x.q, exact in int32, bias removed (-8, -128, -32 as in
     *          cflow_encoding; q4_1 and q4_k have none)
     *   q4_0 q4_1 q8_0 q8_1: acc = fma((float)isum, d * x.scale, acc)
     *   q4_1 q8_1:           then acc = fma(m, x.scale * (float)(sum of the block's 32 codes), acc)
     *   q4_k:  acc = fma((float)isum, (d * s) * x.scale, acc);
     *          acc = fma(-(dmin * t), x.scale * (float)sum32, acc)
     *   q6_k:  per half of 16 columns: acc = fma((float)isum16, (d * s) * x.scale, acc)
     * Float forms, per output and in column order: acc = fma(w, x.f, acc). */
    void (*matmul[CFLOW_N_ENCODINGS])(const matmul_args *args);

    /* Per block of 32 of x (n a multiple of 32): amax = max |x|; scale = amax / 127;
     * q = round-half-even(x * (127 / amax)), clamped to [-127, 127]; all zero where 127 / amax is
     * infinite (amax below 3.8e-37).
     * A block with a NaN or infinity gets scale NaN and codes 0, so that it cannot pass unseen. */
    void (*quantize)(const float *x, uint32_t n, int8_t *q, float *scale, int32_t *sum);

    /* Lane sums: acc[i % 16] = fma(x[i], x[i], acc), then the 16-lane sum. */
    float (*sum_squares)(const float *x, uint32_t n);
    /* y[i] = (x[i] * r) * (w[i] + offset); w NULL: y[i] = x[i] * r. In place allowed. */
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

    /* Blocks of 32 positions in rising order, online softmax:
     *   s[p] = (sum over d in order of fma(q[d], K[d][p], .)) * scale (q8: then * K scale[p]);
     *   positions outside [first, end) get -inf
     *   m' = max(m, max s); c = exp(m - m'); w[p] = exp(s[p] - m')
     *   l = fma(l, c, 16-lane sum of (w[p] + w[p+16]));
     *   o[d] = o[d] * c, then for p from first to end
     *   o[d] = fma(w[p] (q8: * V scale[p]), V[p][d], o[d])
     * and last o[d] / l. f16 and bf16 widen exactly. m and l stay for whoever puts this together
     * with other positions. */
    void (*attend)(const attend_args *args);

    /* max over x; NaN if any is NaN; a zero is +0. */
    float (*max)(const float *x, uint32_t n);
    /* 16-lane sum of exp(x[i] - m). */
    float (*sum_exp)(const float *x, uint32_t n, float m);
    /* y[i] = exp(x[i] - m) */
    void (*exp_shifted)(const float *x, uint32_t n, float m, float *y);

    uint32_t (*crc32c)(uint32_t crc, const void *data, size_t bytes);
    void (*f32_to_f16)(const float *x, uint32_t n, uint16_t *y); /* round half even */
} kernels;

/* Bytes of one stripe of n_cols columns. 0 for an unknown encoding. Does not overflow for
 * n_cols <= 2^31. */
uint64_t stripe_bytes(uint32_t encoding, uint32_t stripe_rows, uint32_t n_cols);
/* Blocks of 32 columns a matrix of n_cols has on disk: padded to 32, to 256 for the k forms. */
uint32_t n_column_blocks(uint32_t encoding, uint32_t n_cols);
/* Dequantises one row of a stripe (row < stripe_rows) into out (n_cols,): the plain reference. */
void stripe_row(uint32_t encoding, const uint8_t *stripe, uint32_t stripe_rows, uint32_t n_cols,
                uint32_t row, float *out);

/* Each overrides what it has a faster version of and leaves the rest. */
void kernels_init_scalar(kernels *k);
void kernels_init_avx2(kernels *k);
void kernels_init_avx512vnni(kernels *k);

/* Fills the table. 0, or -1 if `isa` names nothing this build and CPU can run. NULL: the best. */
int kernels_select(kernels *k, const char *isa);

#endif
