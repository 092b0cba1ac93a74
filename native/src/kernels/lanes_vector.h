/* Norms, activations and softmax in vectors of LANES floats; see lanes.h.
 *
 * A lane of kernels.h is an index modulo 16, so 16-lane sums are kept in PARTS vectors. */

enum { PARTS = 16 / LANES };

/* The same operations as exponential() in scalar.c. */
static INLINE vf f_exp(vf x) {
    x = f_max(f_set1(-104.0f), x); /* this order of operands keeps a NaN */
    x = f_min(f_set1(89.0f), x);
    const vf shifted = f_fma(x, f_set1(0x1.715476p+0f), f_set1(0x1.8p+23f));
    const vf k = shifted - f_set1(0x1.8p+23f);
    vf r = f_fma(k, f_set1(-0x1.62e4p-1f), x);
    r = f_fma(k, f_set1(-0x1.7f7d1cp-20f), r);
    vf p = f_set1(0x1.6a2434p-10f);
    p = f_fma(p, r, f_set1(0x1.1239e2p-7f));
    p = f_fma(p, r, f_set1(0x1.5558f2p-5f));
    p = f_fma(p, r, f_set1(0x1.555492p-3f));
    p = f_fma(p, r, f_set1(0x1.fffffcp-2f));
    p = f_fma(p, r, f_set1(1.0f));
    p = f_fma(p, r, f_set1(1.0f));
    return times_power_of_2(p, k, shifted);
}

/* The same operations as quantize_block() in scalar.c, without clamping: |x| * (127 / amax) is less
 * than 127.5 after rounding. */
static INLINE void quantize_block(const float *x, int8_t *q, float *scale, int32_t *sum) {
    vi largest = f_magnitude(f_load(x));
    for (int i = LANES; i < 32; i += LANES) largest = i_max(largest, f_magnitude(f_load(x + i)));
    const int32_t bits = i_reduce_max(largest);
    float amax;
    memcpy(&amax, &bits, 4);
    const float inverse = 127.0f / amax;
    sum[0] = sum[1] = 0;
    memset(q, 0, 32);
    if (bits >= 0x7f800000 || inverse > FLT_MAX) {
        *scale = bits >= 0x7f800000 ? NAN : 0;
        return;
    }
    *scale = amax / 127.0f;
    for (int i = 0; i < 32; i += LANES) {
        const vi codes = f_round(f_load(x + i) * f_set1(inverse));
        i_store_i8(q + i, codes);
        sum[i / 16] += i_reduce_add(codes);
    }
}

static void quantize(const float *x, uint32_t n, int8_t *q, float *scale, int32_t *sum) {
    for (uint32_t i = 0; i < n; i += 32) quantize_block(x + i, q + i, scale + i / 32, sum + i / 16);
}

/* Number of elements from i on; f_load_n and f_store_n treat LANES and more as a full vector. */
static INLINE uint32_t left(uint32_t n, uint32_t i) {
    return n > i ? n - i : 0;
}

static float sum_squares(const float *x, uint32_t n) {
    vf sum[PARTS] = {f_set1(0)};
    for (uint32_t i = 0; i < n; i += 16) {
        for (uint32_t j = 0; j < PARTS; j++) {
            const uint32_t at = i + j * LANES;
            const vf value = f_load_n(x + at, left(n, at));
            sum[j] = f_fma(value, value, sum[j]);
        }
    }
    return fold16(sum);
}

static void scale_weight(const float *x, float r, const float *w, float offset, uint32_t n,
                         float *y) {
    for (uint32_t i = 0; i < n; i += LANES) {
        vf value = f_load_n(x + i, n - i) * f_set1(r);
        if (w != NULL) value = value * (f_load_n(w + i, n - i) + f_set1(offset));
        f_store_n(y + i, value, n - i);
    }
}

static void add_scaled(const float *x, const float *t, float s, uint32_t n, float *y) {
    for (uint32_t i = 0; i < n; i += LANES) {
        const vf sum = f_fma(f_set1(s), f_load_n(t + i, n - i), f_load_n(x + i, n - i));
        f_store_n(y + i, sum, n - i);
    }
}

static INLINE vf silu(vf v) {
    return v / (f_set1(1.0f) + f_exp(-v));
}

static INLINE vf gelu_tanh(vf v) {
    const vf t = f_fma(v * v * f_set1(0.044715f), v, v);
    return v / (f_set1(1.0f) + f_exp(t * f_set1(-0x1.988454p+0f)));
}

/* libm's erff, lane by lane, so that every instruction set has the same bits. */
static INLINE vf gelu_erf(vf v) {
    float lanes[LANES];
    f_store(lanes, v * f_set1(0x1.6a09e6p-1f));
    for (int i = 0; i < LANES; i++) lanes[i] = erff(lanes[i]);
    return f_set1(0.5f) * v * (f_set1(1.0f) + f_load(lanes));
}

static INLINE void gate_with(const float *gate, const float *up, uint32_t n, vf (*act)(vf),
                             int on_up, float *y) {
    for (uint32_t i = 0; i < n; i += LANES) {
        const vf g = f_load_n(gate + i, n - i), u = f_load_n(up + i, n - i);
        f_store_n(y + i, on_up ? g * act(u) : act(g) * u, n - i);
    }
}

static void gated(const float *gate, const float *up, uint32_t n, cflow_activation activation,
                  int on_up, float *y) {
    if (activation == CFLOW_SILU) gate_with(gate, up, n, silu, on_up, y);
    if (activation == CFLOW_GELU_TANH) gate_with(gate, up, n, gelu_tanh, on_up, y);
    if (activation == CFLOW_GELU_ERF) gate_with(gate, up, n, gelu_erf, on_up, y);
}

static float maximum(const float *x, uint32_t n) {
    vf largest = f_set1(-INFINITY);
    int has_nan = 0;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf value = f_load(x + i);
        has_nan |= f_has_nan(value);
        largest = f_max(value, largest);
    }
    float lanes[LANES], result = -INFINITY;
    f_store(lanes, largest);
    for (uint32_t j = 0; j < LANES; j++) result = lanes[j] > result ? lanes[j] : result;
    for (; i < n; i++) {
        has_nan |= isnan(x[i]);
        result = x[i] > result ? x[i] : result;
    }
    return has_nan ? NAN : result + 0.0f;
}

static float sum_exp(const float *x, uint32_t n, float m) {
    vf sum[PARTS] = {f_set1(0)};
    for (uint32_t i = 0; i < n; i += 16) {
        for (uint32_t j = 0; j < PARTS; j++) {
            const uint32_t at = i + j * LANES, count = left(n, at);
            sum[j] = sum[j] + f_first_n(f_exp(f_load_n(x + at, count) - f_set1(m)), count);
        }
    }
    return fold16(sum);
}

static void exp_shifted(const float *x, uint32_t n, float m, float *y) {
    for (uint32_t i = 0; i < n; i += LANES) {
        f_store_n(y + i, f_exp(f_load_n(x + i, n - i) - f_set1(m)), n - i);
    }
}

static void f32_to_f16(const float *x, uint32_t n, uint16_t *y) {
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) f_store_f16(y + i, f_load(x + i));
    if (i < n) {
        uint16_t last[LANES];
        f_store_f16(last, f_load_n(x + i, n - i));
        memcpy(y + i, last, (n - i) * sizeof *y);
    }
}
