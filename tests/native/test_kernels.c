/* The kernels that work on vectors: each instruction set against scalar bit for bit, and scalar
 * against libm, published vectors and the definitions in double precision. */
#include "kernel_inputs.h"

static float *odd_floats(uint64_t *state, uint32_t n, int special) {
    float *x = exact(n * sizeof *x);
    for (uint32_t i = 0; i < n; i++) x[i] = odd_float(state, special);
    return x;
}

static float *copy_of(const float *x, uint32_t n) {
    float *copy = exact(n * sizeof *copy);
    memcpy(copy, x, n * sizeof *x);
    return copy;
}

/* ---- quantize -------------------------------------------------------------------------------- */

typedef struct {
    int8_t q[32];
    float scale;
    int32_t sum[2];
} block;

static block quantized(const kernels *k, const float *x) {
    block b;
    float *copy = copy_of(x, 32);
    k->quantize(copy, 32, b.q, &b.scale, b.sum);
    free(copy);
    return b;
}

static void check_block(const kernels *scalar, const kernels *k, const float *x) {
    const block want = quantized(scalar, x), got = quantized(k, x);
    CHECK(memcmp(want.q, got.q, 32) == 0, "%s codes", k->isa);
    CHECK(memcmp(want.sum, got.sum, 8) == 0, "%s sums", k->isa);
    check_same(&want.scale, &got.scale, 1, "quantize scale", k->isa);
}

static void test_quantize_rounds_to_the_nearest_code(const kernels *k) {
    uint64_t state = 1;
    for (int round = 0; round < 200; round++) {
        float x[32], amax = 0;
        int32_t sum[2] = {0, 0};
        const float size = ldexpf(1.0f, (int)below(&state, 60) - 30);
        for (int i = 0; i < 32; i++) x[i] = random_float(&state) * size;
        for (int i = 0; i < 32; i++) amax = fmaxf(amax, fabsf(x[i]));
        const block b = quantized(k, x);
        CHECK(b.scale == amax / 127, "scale %a", (double)b.scale);
        for (int i = 0; i < 32; i++) {
            const double error = (double)x[i] / b.scale - b.q[i];
            CHECK(fabs(error) <= 0.50001 && abs(b.q[i]) <= 127, "%f off", error);
            sum[i / 16] += b.q[i];
        }
        CHECK(memcmp(sum, b.sum, sizeof sum) == 0, "sums");
    }
}

static void test_quantize_of_edges(const kernels *scalar, const kernels *k) {
    uint64_t state = 2;
    float x[32] = {0};
    block b = quantized(k, x);
    CHECK(b.scale == 0 && b.q[5] == 0 && b.sum[0] == 0, "%s zeros", k->isa);
    for (int i = 0; i < 32; i++) x[i] = 0x1p-149f * (float)(i + 1); /* 127 / amax overflows */
    b = quantized(k, x);
    CHECK(b.scale == 0 && b.q[31] == 0 && b.sum[1] == 0, "%s subnormals", k->isa);
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int i = 0; i < 96; i++) {
        for (int j = 0; j < 32; j++) x[j] = random_float(&state);
        x[i % 32] = bad[i / 32];
        b = quantized(k, x);
        CHECK(isnan(b.scale) && b.q[0] == 0 && b.sum[0] == 0 && b.sum[1] == 0, "%s bad", k->isa);
    }
    for (int i = 0; i < 32; i++) x[i] = ((float)i - 15.5f) * (127.0f / 15.5f / 2); /* ties */
    x[0] = 127;
    check_block(scalar, k, x);
    for (int round = 0; round < 2000; round++) {
        for (int i = 0; i < 32; i++) x[i] = odd_float(&state, round % 4 == 0);
        check_block(scalar, k, x);
    }
}

/* ---- exp and what is made of it -------------------------------------------------------------- */

static float exp_of(const kernels *k, float x) {
    float y;
    k->exp_shifted(&x, 1, 0, &y);
    return y;
}

static void test_exp_is_within_two_ulp_of_libm(const kernels *k) {
    for (int i = -86000; i <= 88000; i++) {
        const float x = (float)i * 0.001f + 1e-4f;
        const double want = exp((double)x);
        const double ulp = ldexp(1, ilogb(want) - 23);
        CHECK(fabs(exp_of(k, x) - want) < 2 * ulp, "exp(%a) is %a", (double)x,
              (double)exp_of(k, x));
    }
}

static void test_exp_limits(const kernels *k) {
    CHECK(exp_of(k, -INFINITY) == 0 && exp_of(k, -1e30f) == 0 && exp_of(k, -104) == 0, "zero");
    CHECK(exp_of(k, INFINITY) == INFINITY && exp_of(k, 88.8f) == INFINITY, "infinity");
    CHECK(exp_of(k, 0) == 1 && exp_of(k, -0.0f) == 1 && isnan(exp_of(k, NAN)), "one and NaN");
    CHECK(fabs(exp_of(k, -100) - exp(-100.0)) <= 0x1p-149, "subnormal %a", (double)exp_of(k, -100));
}

static void test_exp_gives_scalar_bits(const kernels *scalar, const kernels *k) {
    enum { N = 1000 };
    float x[N], want[N], got[N];
    for (int row = 0; row < 400; row++) {
        for (int i = 0; i < N; i++) x[i] = -110 + (float)(row * N + i) * 0.0005f;
        scalar->exp_shifted(x, N, 0, want);
        k->exp_shifted(x, N, 0, got);
        check_same(want, got, N, "exp", k->isa);
    }
}

static double activation_of(double v, cflow_activation activation) {
    if (activation == CFLOW_SILU) return v / (1 + exp(-v));
    if (activation == CFLOW_GELU_ERF) return 0.5 * v * (1 + erf(v * sqrt(0.5)));
    return 0.5 * v * (1 + tanh(sqrt(2 / acos(-1.0)) * (v + 0.044715 * v * v * v)));
}

static void test_activations_match_their_formulas(const kernels *k) {
    for (int activation = CFLOW_SILU; activation <= CFLOW_GELU_ERF; activation++) {
        for (int i = -4000; i <= 4000; i++) {
            const float v = (float)i * 0.002f, one = 1;
            float y[2];
            k->gated(&v, &one, 1, activation, 0, &y[0]);
            k->gated(&one, &v, 1, activation, 1, &y[1]);
            const double want = activation_of(v, activation);
            CHECK(fabs(y[0] - want) < 1e-6 * (1 + fabs(want)), "%d at %f", activation, (double)v);
            CHECK(y[0] == y[1], "%d on up at %f", activation, (double)v);
        }
    }
}

/* ---- elementwise entries and reductions ------------------------------------------------------ */

static void check_elementwise(const kernels *scalar, const kernels *k, uint32_t n,
                              uint64_t *state) {
    float *x = odd_floats(state, n, 1), *t = odd_floats(state, n, 1);
    float *want = exact(n * sizeof *want), *got = copy_of(x, n);
    const float r = random_float(state), m = random_float(state) * 4;

    scalar->scale_weight(x, r, t, 1, n, want);
    k->scale_weight(got, r, t, 1, n, got);
    check_same(want, got, n, "scale_weight", k->isa);
    scalar->scale_weight(x, r, NULL, 1, n, want);
    k->scale_weight(x, r, NULL, 1, n, got);
    check_same(want, got, n, "scale_weight without w", k->isa);

    scalar->add_scaled(x, t, r, n, want);
    memcpy(got, x, n * sizeof *x);
    k->add_scaled(got, t, r, n, got);
    check_same(want, got, n, "add_scaled", k->isa);

    for (int form = 0; form < 6; form++) {
        scalar->gated(x, t, n, form / 2, form % 2, want);
        k->gated(x, t, n, form / 2, form % 2, got);
        check_same(want, got, n, "gated", k->isa);
    }
    scalar->exp_shifted(x, n, m, want);
    k->exp_shifted(x, n, m, got);
    check_same(want, got, n, "exp_shifted", k->isa);

    uint16_t *halves = exact(n * sizeof *halves), *other = exact(n * sizeof *other);
    scalar->f32_to_f16(x, n, halves);
    k->f32_to_f16(x, n, other);
    CHECK(memcmp(halves, other, n * sizeof *halves) == 0, "%s f32_to_f16 of %u", k->isa, n);
    free(halves), free(other), free(x), free(t), free(want), free(got);
}

static void check_reductions(const kernels *scalar, const kernels *k, uint32_t n, uint64_t *state) {
    for (int special = 0; special < 2; special++) {
        float *x = odd_floats(state, n, special);
        const float m = scalar->max(x, n);
        const float want[] = {m, scalar->sum_exp(x, n, m), scalar->sum_squares(x, n)};
        const float got[] = {k->max(x, n), k->sum_exp(x, n, m), k->sum_squares(x, n)};
        check_same(want, got, 3, "max, sum_exp, sum_squares", k->isa);
        free(x);
    }
}

static void test_every_length_gives_scalar_bits(const kernels *scalar, const kernels *k) {
    uint64_t state = 3;
    for (uint32_t n = 1; n <= 100; n++) {
        check_elementwise(scalar, k, n, &state);
        check_reductions(scalar, k, n, &state);
    }
}

static void test_reductions_match_double_sums(const kernels *k) {
    uint64_t state = 4;
    for (uint32_t n = 1; n < 300; n += 7) {
        float *x = exact(n * sizeof *x), largest = -INFINITY;
        double squares = 0, exps = 0;
        for (uint32_t i = 0; i < n; i++) {
            x[i] = random_float(&state) * 5;
            largest = fmaxf(largest, x[i]);
            squares += (double)x[i] * x[i];
        }
        for (uint32_t i = 0; i < n; i++) exps += exp((double)x[i] - largest);
        CHECK(k->max(x, n) == largest, "max of %u", n);
        CHECK(fabs(k->sum_squares(x, n) / squares - 1) < 1e-5, "squares of %u", n);
        CHECK(fabs(k->sum_exp(x, n, largest) / exps - 1) < 1e-5, "exps of %u", n);
        free(x);
    }
}

static void test_max_keeps_nan_and_makes_zero_positive(const kernels *k) {
    float x[40];
    for (uint32_t n = 1; n <= 40; n++) {
        for (uint32_t i = 0; i < n; i++) x[i] = i % 3 ? -1.0f : -0.0f;
        CHECK(k->max(x, n) == 0 && !signbit(k->max(x, n)), "%s zero of %u", k->isa, n);
        x[n / 2] = NAN;
        CHECK(isnan(k->max(x, n)), "%s NaN of %u", k->isa, n);
    }
}

static void test_f16_rounds_half_to_even(const kernels *k) {
    uint64_t state = 5;
    for (uint32_t i = 0; i < 200000; i++) {
        const uint32_t bits = i < 65536 ? i << 13 | (i & 1 ? 0x1000 : 0) : random_u32(&state);
        float x;
        uint16_t got, want;
        memcpy(&x, &bits, 4);
        if (isnan(x)) continue;
        const _Float16 half = (_Float16)x; /* the compiler's own conversion */
        memcpy(&want, &half, 2);
        k->f32_to_f16(&x, 1, &got);
        CHECK(got == want, "%a is %04x, not %04x", (double)x, want, got);
    }
}

/* ---- checksums and the choice of a table ----------------------------------------------------- */

static void test_crc32c_gives_published_values(const kernels *k) {
    uint8_t zeros[32] = {0}, ones[32], rising[32];
    memset(ones, 0xff, 32);
    for (int i = 0; i < 32; i++) rising[i] = (uint8_t)i;
    CHECK(k->crc32c(0, "123456789", 9) == 0xe3069283, "%s check value", k->isa);
    CHECK(k->crc32c(0, zeros, 32) == 0x8a9136aa, "%s RFC 3720 zeros", k->isa);
    CHECK(k->crc32c(0, ones, 32) == 0x62a8ab43, "%s RFC 3720 ones", k->isa);
    CHECK(k->crc32c(0, rising, 32) == 0x46dd794e, "%s RFC 3720 rising", k->isa);
    CHECK(k->crc32c(7, zeros, 0) == 7, "%s of nothing", k->isa);
}

static void test_crc32c_of_every_length_and_cut(const kernels *scalar, const kernels *k) {
    uint64_t state = 6;
    const size_t bytes = 150001;
    uint8_t *data = exact(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)random_u32(&state);
    const uint32_t whole = scalar->crc32c(0, data, bytes);
    CHECK(k->crc32c(0, data, bytes) == whole, "%s whole", k->isa);
    CHECK(cflow_crc32c(0, data, bytes) == whole, "public");
    for (int i = 0; i < 30; i++) {
        const size_t cut = below(&state, (uint32_t)bytes);
        const uint32_t first = k->crc32c(0, data, cut);
        CHECK(k->crc32c(first, data + cut, bytes - cut) == whole, "%s cut at %zu", k->isa, cut);
    }
    for (size_t n = 0; n < 40; n++) {
        CHECK(k->crc32c(1, data + n, n) == scalar->crc32c(1, data + n, n), "%s %zu", k->isa, n);
    }
    free(data);
}

static void test_select_refuses_what_is_not_there(void) {
    kernels k;
    CHECK(kernels_select(&k, "sse9") == -1 && kernels_select(&k, "") == -1, "unknown names");
    CHECK(kernels_select(&k, NULL) == 0 && strcmp(k.isa, cflow_best_isa()) == 0, "%s", k.isa);
    CHECK(kernels_select(&k, "scalar") == 0 && strcmp(k.isa, "scalar") == 0, "%s", k.isa);
}

int main(void) {
    kernels scalar, k;
    test_select_refuses_what_is_not_there();
    CHECK(kernels_select(&scalar, "scalar") == 0, "scalar");
    test_quantize_rounds_to_the_nearest_code(&scalar);
    test_exp_is_within_two_ulp_of_libm(&scalar);
    test_exp_limits(&scalar);
    test_activations_match_their_formulas(&scalar);
    test_reductions_match_double_sums(&scalar);
    test_f16_rounds_half_to_even(&scalar);
    for (int i = 0; i < N_ISAS; i++) {
        if (kernels_select(&k, all_isas[i]) != 0) {
            printf("%s: not on this machine\n", all_isas[i]);
            continue;
        }
        test_quantize_of_edges(&scalar, &k);
        test_exp_limits(&k);
        test_exp_gives_scalar_bits(&scalar, &k);
        test_max_keeps_nan_and_makes_zero_positive(&k);
        test_every_length_gives_scalar_bits(&scalar, &k);
        test_crc32c_gives_published_values(&k);
        test_crc32c_of_every_length_and_cut(&scalar, &k);
        printf("%s: ok\n", all_isas[i]);
    }
    return 0;
}
