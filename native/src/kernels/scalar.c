/* The reference: every entry of the table as a plain loop that follows its definition in kernels.h.
 * The other instruction sets are tested against it bit for bit, so it is written for clarity. */
#include <math.h>

#include "layout.h"

/* ---- matmul ---------------------------------------------------------------------------------- */

/* One output and one quant block. */
typedef struct {
    const uint8_t *head, *block; /* first bytes of the tile and of the block */
    uint32_t groups, row;        /* of the stripe; the output's row in it */
    const activations *x;
    size_t x_row;
    uint32_t column; /* the block's first column in the matrix */
} cell;

/* Returns acc plus the cell's products, added as kernels.h says. */
typedef float (*cell_fn)(const cell *, float acc);

static float x_float(const cell *c, uint32_t col) {
    return c->x->f[c->x_row * c->x->ld + c->column + col];
}
static int x_code(const cell *c, uint32_t col) {
    return c->x->q[c->x_row * c->x->ld + c->column + col];
}
static float x_scale(const cell *c) {
    return c->x->scale[(c->x_row * c->x->ld + c->column) / 32];
}

/* x.scale * (sum of the block's 32 codes) */
static float x_scaled_sum(const cell *c) {
    const int32_t *halves = c->x->sum + (c->x_row * c->x->ld + c->column) / 16;
    return x_scale(c) * (float)(halves[0] + halves[1]);
}

static float cell_f32(const cell *c, float acc) {
    for (uint32_t col = 0; col < 32; col++) {
        acc = fmaf(f32_at(c->block, float_index(c->row, col)), x_float(c, col), acc);
    }
    return acc;
}

static float cell_f16(const cell *c, float acc) {
    for (uint32_t col = 0; col < 32; col++) {
        acc = fmaf(f16_at(c->block, float_index(c->row, col)), x_float(c, col), acc);
    }
    return acc;
}

static float cell_bf16(const cell *c, float acc) {
    for (uint32_t col = 0; col < 32; col++) {
        acc = fmaf(widen_bf16(u16_at(c->block, float_index(c->row, col))), x_float(c, col), acc);
    }
    return acc;
}

static int32_t dot4(const cell *c, int bias) {
    int32_t sum = 0;
    for (uint32_t col = 0; col < 32; col++) {
        sum += (code4(c->block, c->row, col) - bias) * x_code(c, col);
    }
    return sum;
}

static int32_t dot8(const cell *c) {
    int32_t sum = 0;
    for (uint32_t col = 0; col < 32; col++) {
        sum += (code8(c->block, c->row, col) - 128) * x_code(c, col);
    }
    return sum;
}

static int32_t dot6(const cell *c, uint32_t half) {
    int32_t sum = 0;
    for (uint32_t col = half * 16; col < half * 16 + 16; col++) {
        sum += (code6(c->block, c->groups, c->row, col) - 32) * x_code(c, col);
    }
    return sum;
}

static float cell_q4_0(const cell *c, float acc) {
    const float d = f16_at(c->block + c->groups * 256, c->row);
    return fmaf((float)dot4(c, 8), d * x_scale(c), acc);
}

static float cell_q4_1(const cell *c, float acc) {
    const uint8_t *scales = c->block + c->groups * 256;
    const float d = f16_at(scales, c->row), m = f16_at(scales, c->groups * 16 + c->row);
    acc = fmaf((float)dot4(c, 0), d * x_scale(c), acc);
    return fmaf(m, x_scaled_sum(c), acc);
}

static float cell_q8_0(const cell *c, float acc) {
    const float d = f16_at(c->block + c->groups * 512, c->row);
    return fmaf((float)dot8(c), d * x_scale(c), acc);
}

static float cell_q8_1(const cell *c, float acc) {
    const uint8_t *scales = c->block + c->groups * 512;
    const float d = f16_at(scales, c->row), m = f16_at(scales, c->groups * 16 + c->row);
    acc = fmaf((float)dot8(c), d * x_scale(c), acc);
    return fmaf(m, x_scaled_sum(c), acc);
}

static float cell_q4_k(const cell *c, float acc) {
    const uint8_t *scales = c->block + c->groups * 256;
    const float d = f16_at(c->head, c->row), dmin = f16_at(c->head, c->groups * 16 + c->row);
    const float s = (float)scales[c->row], t = (float)scales[c->groups * 16 + c->row];
    acc = fmaf((float)dot4(c, 0), (d * s) * x_scale(c), acc);
    return fmaf(-(dmin * t), x_scaled_sum(c), acc);
}

static float cell_q6_k(const cell *c, float acc) {
    const uint8_t *scales = c->block + c->groups * 384;
    const float d = f16_at(c->head, c->row);
    for (uint32_t half = 0; half < 2; half++) {
        const float s = (float)(int8_t)scales[half * c->groups * 16 + c->row];
        acc = fmaf((float)dot6(c, half), (d * s) * x_scale(c), acc);
    }
    return acc;
}

static float output(const matmul_args *a, uint32_t encoding, cell_fn add, uint32_t row,
                    size_t x_row) {
    float acc = 0;
    for (uint32_t b = 0; b < a->n_blocks; b++) {
        const cell c = {.head = a->stripe + tile_head(encoding, a->stripe_groups, b),
                        .block = a->stripe + block_start(encoding, a->stripe_groups, b),
                        .groups = a->stripe_groups,
                        .row = row,
                        .x = &a->x,
                        .x_row = x_row,
                        .column = b * 32};
        acc = add(&c, acc);
    }
    return acc;
}

static void matmul(const matmul_args *a, uint32_t encoding, cell_fn add) {
    for (uint32_t i = 0; i < a->m; i++) {
        const size_t x_row = a->x_rows ? (size_t)a->x_rows[i] : i;
        const size_t y_row = a->y_rows ? (size_t)a->y_rows[i] : i;
        for (uint32_t r = 0; r < a->n_groups * 16; r++) {
            a->y[y_row * a->y_ld + r] = output(a, encoding, add, a->first * 16 + r, x_row);
        }
    }
}

static void matmul_f32(const matmul_args *a) {
    matmul(a, CFLOW_F32, cell_f32);
}
static void matmul_f16(const matmul_args *a) {
    matmul(a, CFLOW_F16, cell_f16);
}
static void matmul_bf16(const matmul_args *a) {
    matmul(a, CFLOW_BF16, cell_bf16);
}
static void matmul_q4_0(const matmul_args *a) {
    matmul(a, CFLOW_Q4_0, cell_q4_0);
}
static void matmul_q4_1(const matmul_args *a) {
    matmul(a, CFLOW_Q4_1, cell_q4_1);
}
static void matmul_q8_0(const matmul_args *a) {
    matmul(a, CFLOW_Q8_0, cell_q8_0);
}
static void matmul_q8_1(const matmul_args *a) {
    matmul(a, CFLOW_Q8_1, cell_q8_1);
}
static void matmul_q4_k(const matmul_args *a) {
    matmul(a, CFLOW_Q4_K, cell_q4_k);
}
static void matmul_q6_k(const matmul_args *a) {
    matmul(a, CFLOW_Q6_K, cell_q6_k);
}

/* ---- vectors --------------------------------------------------------------------------------- */

static void quantize_block(const float *x, int8_t *q, float *scale, int32_t *sum) {
    uint32_t largest = 0; /* bits of max |x|; they sort like the values, NaN above infinity */
    for (int i = 0; i < 32; i++) {
        const uint32_t bits = bits_of_float(x[i]) & 0x7fffffff;
        if (bits > largest) largest = bits;
    }
    const float amax = float_of_bits(largest), inverse = 127.0f / amax;
    sum[0] = sum[1] = 0;
    memset(q, 0, 32);
    if (largest >= 0x7f800000 || !isfinite(inverse)) {
        *scale = largest >= 0x7f800000 ? NAN : 0;
        return;
    }
    *scale = amax / 127.0f;
    for (int i = 0; i < 32; i++) {
        const float code = rintf(x[i] * inverse);
        q[i] = (int8_t)(code > 127 ? 127 : code < -127 ? -127 : code);
        sum[i / 16] += q[i];
    }
}

static void quantize(const float *x, uint32_t n, int8_t *q, float *scale, int32_t *sum) {
    for (uint32_t i = 0; i < n; i += 32) quantize_block(x + i, q + i, scale + i / 32, sum + i / 16);
}

static float fold16(const float *lanes) {
    float sums[16];
    memcpy(sums, lanes, sizeof sums);
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    }
    return sums[0];
}

static float sum_squares(const float *x, uint32_t n) {
    float lanes[16] = {0};
    for (uint32_t i = 0; i < n; i++) lanes[i % 16] = fmaf(x[i], x[i], lanes[i % 16]);
    return fold16(lanes);
}

static void scale_weight(const float *x, float r, const float *w, float offset, uint32_t n,
                         float *y) {
    for (uint32_t i = 0; i < n; i++) y[i] = w ? (x[i] * r) * (w[i] + offset) : x[i] * r;
}

static void add_scaled(const float *x, const float *t, float s, uint32_t n, float *y) {
    for (uint32_t i = 0; i < n; i++) y[i] = fmaf(s, t[i], x[i]);
}

/* exp(x) = 2^k exp(r), |r| <= ln 2 / 2; exp(r) = 1 + r + r^2 q(r), where q is the minimax
 * polynomial of degree 4 (error 3e-9). Adding 1.5 * 2^23 rounds x / ln 2 to k, half to even, and
 * leaves k in the low bits. 2^k is multiplied in two factors, so that subnormal results are rounded
 * once and overflow gives infinity. */
static float exponential(float x) {
    x = -104.0f > x ? -104.0f : x; /* this order of operands keeps a NaN */
    x = 89.0f < x ? 89.0f : x;
    const float shifted = fmaf(x, 0x1.715476p+0f, 0x1.8p+23f);
    const float k = shifted - 0x1.8p+23f;
    float r = fmaf(k, -0x1.62e4p-1f, x);
    r = fmaf(k, -0x1.7f7d1cp-20f, r);
    float p = 0x1.6a2434p-10f;
    p = fmaf(p, r, 0x1.1239e2p-7f);
    p = fmaf(p, r, 0x1.5558f2p-5f);
    p = fmaf(p, r, 0x1.555492p-3f);
    p = fmaf(p, r, 0x1.fffffcp-2f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    const int32_t power = (int32_t)(bits_of_float(shifted) - bits_of_float(0x1.8p+23f));
    const int32_t half = power >> 1, rest = power - half;
    p *= float_of_bits((uint32_t)(half + 127) << 23);
    return p * float_of_bits((uint32_t)(rest + 127) << 23);
}

static float activate(float v, cflow_activation activation) {
    if (activation == CFLOW_GELU_ERF) return 0.5f * v * (1.0f + erff(v * 0x1.6a09e6p-1f));
    if (activation == CFLOW_GELU_TANH) {
        const float t = fmaf(v * v * 0.044715f, v, v);
        return v / (1.0f + exponential(t * -0x1.988454p+0f));
    }
    return v / (1.0f + exponential(-v));
}

static void gated(const float *gate, const float *up, uint32_t n, cflow_activation activation,
                  int on_up, float *y) {
    for (uint32_t i = 0; i < n; i++) {
        y[i] =
            on_up ? gate[i] * activate(up[i], activation) : activate(gate[i], activation) * up[i];
    }
}

static float maximum(const float *x, uint32_t n) {
    float largest = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        if (isnan(x[i])) return NAN;
        if (x[i] > largest) largest = x[i];
    }
    return largest + 0.0f;
}

static float sum_exp(const float *x, uint32_t n, float m) {
    float lanes[16] = {0};
    for (uint32_t i = 0; i < n; i++) lanes[i % 16] += exponential(x[i] - m);
    return fold16(lanes);
}

static void exp_shifted(const float *x, uint32_t n, float m, float *y) {
    for (uint32_t i = 0; i < n; i++) y[i] = exponential(x[i] - m);
}

/* ---- attention ------------------------------------------------------------------------------- */

static float kv_value(cflow_kv_type type, const uint8_t *base, size_t index) {
    switch (type) {
    case CFLOW_KV_F32:
        return f32_at(base, index);
    case CFLOW_KV_BF16:
        return widen_bf16(u16_at(base, index));
    case CFLOW_KV_Q8:
        return (float)(int8_t)base[index];
    default:
        return f16_at(base, index);
    }
}

static size_t kv_value_bytes(cflow_kv_type type) {
    return type == CFLOW_KV_F32 ? 4 : type == CFLOW_KV_Q8 ? 1 : 2;
}

/* w (32,): exp(score - m), 0 for positions outside [first, end). Updates m and returns exp(old m -
 * new m). */
static float weigh(const attend_args *a, const float *q, uint32_t start, float *w, float *m) {
    const uint8_t *block = a->blocks[start / 32];
    const uint8_t *k_scales = block + (size_t)a->head_dim * 64;
    float largest = *m;
    for (uint32_t p = 0; p < 32; p++) {
        float s = 0;
        for (uint32_t d = 0; d < a->head_dim; d++) {
            s = fmaf(q[d], kv_value(a->kv_type, block, (size_t)d * 32 + p), s);
        }
        s *= a->scale;
        if (a->kv_type == CFLOW_KV_Q8) s *= f32_at(k_scales, p);
        if (a->cap > 0) s = a->cap - 2 * a->cap / (1.0f + exponential(s * (2 / a->cap)));
        w[p] = start + p >= a->first && start + p < a->end ? s : -INFINITY;
        if (w[p] > largest) largest = w[p];
    }
    for (uint32_t p = 0; p < 32; p++) w[p] = exponential(w[p] - largest);
    const float c = exponential(*m - largest);
    *m = largest;
    return c;
}

static void add_values(const attend_args *a, uint32_t start, const float *w, float c, float *o) {
    const uint8_t *block = a->blocks[start / 32];
    const uint8_t *v = block + (size_t)a->head_dim * 32 * kv_value_bytes(a->kv_type);
    const uint8_t *v_scales = block + (size_t)a->head_dim * 64 + 128;
    for (uint32_t d = 0; d < a->head_dim; d++) {
        float sum = o[d] * c;
        for (uint32_t p = 0; p < 32; p++) {
            if (start + p < a->first || start + p >= a->end) continue;
            const float weight = a->kv_type == CFLOW_KV_Q8 ? w[p] * f32_at(v_scales, p) : w[p];
            sum = fmaf(weight, kv_value(a->kv_type, v, (size_t)p * a->head_dim + d), sum);
        }
        o[d] = sum;
    }
}

static void attend(const attend_args *a) {
    for (uint32_t h = 0; h < a->n_heads; h++) {
        float w[32], pairs[16], *m = a->m + h, *l = a->l + h;
        float *o = a->o + (size_t)h * a->head_dim;
        *m = -INFINITY, *l = 0;
        for (uint32_t d = 0; d < a->head_dim; d++) o[d] = 0;
        for (uint32_t start = a->first / 32 * 32; start < a->end; start += 32) {
            const float c = weigh(a, a->q + (size_t)h * a->head_dim, start, w, m);
            for (int i = 0; i < 16; i++) pairs[i] = w[i] + w[i + 16];
            *l = fmaf(*l, c, fold16(pairs));
            add_values(a, start, w, c, o);
        }
        for (uint32_t d = 0; d < a->head_dim; d++) o[d] /= *l;
    }
}

/* ---- checksums and storage ------------------------------------------------------------------- */

static uint32_t crc32c(uint32_t crc, const void *data, size_t bytes) {
    static const uint32_t by_nibble[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
        0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
        0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
    };
    const uint8_t *byte = data;
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= byte[i];
        crc = crc >> 4 ^ by_nibble[crc & 15];
        crc = crc >> 4 ^ by_nibble[crc & 15];
    }
    return ~crc;
}

static uint16_t narrow_f16(float value) {
    const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffff;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return sign | 0x7e00 | (uint16_t)(magnitude >> 13 & 0x3ff);
    if (magnitude >= 0x477ff000) return sign | 0x7c00; /* 65520 and up: infinity */
    if (magnitude < 0x38800000) { /* below 2^-14: a multiple of 2^-24, rounded by the adder */
        const float rounded = float_of_bits(magnitude) + 0.5f;
        return sign | (uint16_t)(bits_of_float(rounded) - bits_of_float(0.5f));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    return sign | (uint16_t)((magnitude - (112u << 23) + 0xfff + odd) >> 13);
}

static void f32_to_f16(const float *x, uint32_t n, uint16_t *y) {
    for (uint32_t i = 0; i < n; i++) y[i] = narrow_f16(x[i]);
}

void kernels_init_scalar(kernels *k) {
    *k = (kernels){
        .isa = "scalar",
        .matmul = {[CFLOW_F32] = matmul_f32,
                   [CFLOW_F16] = matmul_f16,
                   [CFLOW_BF16] = matmul_bf16,
                   [CFLOW_Q4_0] = matmul_q4_0,
                   [CFLOW_Q4_1] = matmul_q4_1,
                   [CFLOW_Q8_0] = matmul_q8_0,
                   [CFLOW_Q8_1] = matmul_q8_1,
                   [CFLOW_Q4_K] = matmul_q4_k,
                   [CFLOW_Q6_K] = matmul_q6_k},
        .quantize = quantize,
        .sum_squares = sum_squares,
        .scale_weight = scale_weight,
        .add_scaled = add_scaled,
        .gated = gated,
        .attend = attend,
        .max = maximum,
        .sum_exp = sum_exp,
        .exp_shifted = exp_shifted,
        .crc32c = crc32c,
        .f32_to_f16 = f32_to_f16,
    };
}
