/* Matrix products. Stripes are packed here by docs/format.md from plain matrices; the dequantiser
 * must give those back, scalar must match their product in double precision, and the other
 * instruction sets must match scalar bit for bit. */
#include "kernel_inputs.h"

static const char *const names[CFLOW_N_ENCODINGS] = {"f32",  "f16",  "bf16", "q4_0", "q4_1",
                                                     "q8_0", "q8_1", "q4_k", "q6_k"};

static int is_float(uint32_t e) {
    return e <= CFLOW_BF16;
}
static int is_k(uint32_t e) {
    return e == CFLOW_Q4_K || e == CFLOW_Q6_K;
}
static int is_nibble(uint32_t e) {
    return e == CFLOW_Q4_0 || e == CFLOW_Q4_1 || e == CFLOW_Q4_K;
}
static int has_m(uint32_t e) {
    return e == CFLOW_Q4_1 || e == CFLOW_Q8_1;
}

static size_t float_bytes(uint32_t e) {
    return e == CFLOW_F32 ? 4 : 2;
}

/* ---- a matrix and its stripe ----------------------------------------------------------------- */

/* What the numbers are like. */
typedef enum { PLAIN, LOWEST, HIGHEST, HUGE_SCALES, TINY_SCALES, BROKEN, N_MOODS } mood_kind;

typedef struct {
    uint32_t encoding, groups, n_blocks;
    size_t bytes;
    uint8_t *stripe;
    double *value; /* (rows, columns) */
    double *size;  /* (rows, columns): |d q| + |m|, what rounding errors are measured by */
} matrix;

static double half_value(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (double)half;
}

static uint16_t random_half(mood_kind mood, uint64_t *state) {
    const _Float16 plain = (_Float16)(random_float(state) / 8);
    uint16_t bits;
    memcpy(&bits, &plain, 2);
    if (mood == HUGE_SCALES) return (uint16_t)(0x7bff | (bits & 0x8000));
    if (mood == TINY_SCALES) return bits & 0x83ff;
    if (mood == BROKEN && below(state, 40) == 0) return below(state, 2) ? 0x7e00 : 0xfc00;
    return bits;
}

static uint8_t random_code(mood_kind mood, uint32_t largest, uint64_t *state) {
    if (mood == LOWEST) return 0;
    if (mood == HIGHEST) return (uint8_t)largest;
    return (uint8_t)below(state, largest + 1);
}

/* Codes of one group and block, code[col][row], into its bytes: docs/format.md, "Codes". */
static void put_codes8(uint8_t *bytes, uint8_t code[32][16]) {
    for (int j = 0; j < 8; j++)
        for (int r = 0; r < 16; r++)
            for (int c = 0; c < 4; c++) bytes[64 * j + 4 * r + c] = code[4 * j + c][r];
}
static void put_codes4(uint8_t *bytes, uint8_t code[32][16]) {
    for (int v = 0; v < 4; v++)
        for (int r = 0; r < 16; r++)
            for (int c = 0; c < 4; c++) {
                const int low = code[8 * v + c][r] & 15, high = code[8 * v + 4 + c][r] & 15;
                bytes[64 * v + 4 * r + c] = (uint8_t)(low | high << 4);
            }
}
static void put_pairs(uint8_t *bytes, uint8_t code[32][16]) {
    for (int u = 0; u < 2; u++)
        for (int r = 0; r < 16; r++)
            for (int c = 0; c < 4; c++) {
                int byte = 0;
                for (int k = 0; k < 4; k++) byte |= code[16 * u + 4 * k + c][r] >> 4 << 2 * k;
                bytes[64 * u + 4 * r + c] = (uint8_t)byte;
            }
}

static void set_value(matrix *m, uint32_t row, uint32_t col, double value, double size) {
    m->value[(size_t)row * m->n_blocks * 32 + col] = value;
    m->size[(size_t)row * m->n_blocks * 32 + col] = size;
}

static void fill_floats(matrix *m, uint8_t *at, uint32_t g, uint32_t b, mood_kind mood,
                        uint64_t *state) {
    const size_t width = float_bytes(m->encoding);
    for (uint32_t c = 0; c < 32; c++) {
        for (uint32_t r = 0; r < 16; r++, at += width) {
            const uint16_t half = random_half(mood, state);
            float f = odd_float(state, mood == BROKEN);
            uint32_t bits;
            if (mood != BROKEN && fabsf(f) > 1e30f)
                f = 1e30f; /* no infinite sums in the reference */
            memcpy(&bits, &f, 4);
            if (m->encoding == CFLOW_BF16) bits &= 0xffff0000;
            memcpy(&f, &bits, 4);
            if (m->encoding == CFLOW_F16) f = (float)half_value(half);
            if (m->encoding == CFLOW_F32) memcpy(at, &f, 4);
            if (m->encoding == CFLOW_F16) memcpy(at, &half, 2);
            if (m->encoding == CFLOW_BF16) memcpy(at, (uint8_t *)&f + 2, 2);
            set_value(m, g * 16 + r, b * 32 + c, f, fabs((double)f));
        }
    }
}

/* One array of 16 f16 a group. */
static double put_half(uint8_t *array, uint32_t row, uint16_t bits) {
    memcpy(array + 2 * (size_t)row, &bits, 2);
    return half_value(bits);
}

/* Group g of a block of an integer form; d and dmin of the tile's head where there is one. */
static void fill_group(matrix *m, const uint8_t *head, uint8_t *block, uint32_t g, uint32_t b,
                       mood_kind mood, uint64_t *state) {
    const uint32_t e = m->encoding, rows = m->groups * 16;
    const uint32_t largest = is_nibble(e) ? 15 : e == CFLOW_Q6_K ? 63 : 255;
    const int bias = e == CFLOW_Q4_0 ? 8 : e == CFLOW_Q6_K ? 32 : largest == 255 ? 128 : 0;
    const size_t code_bytes = largest == 255 ? 512 : 256;
    uint8_t code[32][16];
    for (int i = 0; i < 512; i++) code[i / 16][i % 16] = random_code(mood, largest, state);
    if (largest == 255) put_codes8(block + g * 512, code);
    if (largest != 255) put_codes4(block + g * 256, code);
    if (largest == 63) put_pairs(block + m->groups * 256 + g * 128, code);
    uint8_t *arrays = block + m->groups * (code_bytes + (largest == 63 ? 128 : 0));
    for (uint32_t r = g * 16; r < g * 16 + 16; r++) {
        double d[2], min = 0;
        uint16_t half;
        memcpy(&half, head + 2 * (size_t)r, 2);
        if (is_k(e)) {
            const uint8_t s = random_code(mood, 255, state), t = random_code(mood, 255, state);
            arrays[r] = s, arrays[rows + r] = t;
            d[0] = half_value(half) * (e == CFLOW_Q6_K ? (int8_t)s : s);
            d[1] = half_value(half) * (e == CFLOW_Q6_K ? (int8_t)t : s);
            memcpy(&half, head + 2 * (size_t)(rows + r), 2);
            if (e == CFLOW_Q4_K) min = -half_value(half) * t;
        } else {
            d[0] = d[1] = put_half(arrays, r, random_half(mood, state));
            if (has_m(e)) min = put_half(arrays + rows * 2, r, random_half(mood, state));
        }
        for (uint32_t c = 0; c < 32; c++) {
            const double product = d[c / 16] * (code[c][r % 16] - bias);
            set_value(m, r, b * 32 + c, product + min, fabs(product) + fabs(min));
        }
    }
}

static matrix make_matrix(uint32_t encoding, uint32_t groups, uint32_t n_blocks, mood_kind mood,
                          uint64_t *state) {
    matrix m = {.encoding = encoding, .groups = groups, .n_blocks = n_blocks};
    const size_t n = (size_t)groups * 16 * n_blocks * 32;
    const uint32_t head = encoding == CFLOW_Q4_K ? 64 : encoding == CFLOW_Q6_K ? 32 : 0;
    const uint32_t codes = is_nibble(encoding) ? 256 : encoding == CFLOW_Q6_K ? 384 : 512;
    const uint32_t arrays = has_m(encoding) ? 64 : 32; /* two of 16 bytes in the k forms */
    const uint32_t block =
        is_float(encoding) ? 512 * (uint32_t)float_bytes(encoding) : codes + arrays;
    m.bytes = stripe_bytes(encoding, groups * 16, n_blocks * 32);
    CHECK(m.bytes == groups * ((size_t)n_blocks / 8 * head + n_blocks * block), "%zu", m.bytes);
    m.stripe = aligned_alloc(64, m.bytes);
    m.value = exact(n * sizeof *m.value);
    m.size = exact(n * sizeof *m.size);
    uint8_t *at = m.stripe, *tile = at;
    for (uint32_t b = 0; b < n_blocks; b++, at += groups * block) {
        if (b % 8 == 0) {
            tile = at;
            at += groups * head;
            for (uint32_t i = 0; i < groups * head / 2; i++)
                put_half(tile, i, random_half(mood, state));
        }
        for (uint32_t g = 0; g < groups; g++) {
            if (is_float(encoding)) fill_floats(&m, at + g * block, g, b, mood, state);
            if (!is_float(encoding)) fill_group(&m, tile, at, g, b, mood, state);
        }
    }
    CHECK(at == m.stripe + m.bytes, "the stripe is full");
    return m;
}

static void free_matrix(matrix *m) {
    free(m->stripe), free(m->value), free(m->size);
}

static void check_dequantised(const matrix *m) {
    const uint32_t n_cols = m->n_blocks * 32;
    float *row = exact(n_cols * sizeof *row);
    for (uint32_t r = 0; r < m->groups * 16; r++) {
        stripe_row(m->encoding, m->stripe, m->groups * 16, n_cols, r, row);
        for (uint32_t c = 0; c < n_cols; c++) {
            const double want = m->value[(size_t)r * n_cols + c];
            const double slack = m->size[(size_t)r * n_cols + c] * 1e-6;
            CHECK(fabs(row[c] - want) <= slack || !isfinite(want), "%s [%u, %u] is %g, not %g",
                  names[m->encoding], r, c, (double)row[c], want);
        }
    }
    free(row);
}

/* ---- activations ----------------------------------------------------------------------------- */

/* Only what the encoding may read is there. */
static activations make_x(const matrix *m, uint32_t rows, mood_kind mood, uint64_t *state) {
    const size_t ld = ((size_t)m->n_blocks + 7) / 8 * 256, n = rows * ld;
    activations x = {.ld = ld};
    if (is_float(m->encoding)) {
        float *f = exact(n * sizeof *f);
        for (size_t i = 0; i < n; i++) {
            const float value = odd_float(state, mood == BROKEN);
            f[i] = mood == BROKEN || fabsf(value) < 1e3f ? value : 1;
        }
        x.f = f;
        return x;
    }
    int8_t *q = exact(n);
    float *scale = exact(n / 32 * sizeof *scale);
    int32_t *sum = calloc(n / 16, sizeof *sum);
    for (size_t i = 0; i < n; i++) {
        const int sign = mood == LOWEST || (mood == HUGE_SCALES && i % 2) ? -1 : 1;
        q[i] = (int8_t)(mood == PLAIN ? (int)below(state, 255) - 127 : 127 * sign);
        if (i % ld >= m->n_blocks * 32) q[i] = 0;
        sum[i / 16] += q[i];
    }
    for (size_t i = 0; i < n / 32; i++) {
        scale[i] = fabsf(random_float(state)) * (mood == TINY_SCALES ? 0x1p-120f : 1);
        if (mood == BROKEN && below(state, 30) == 0) scale[i] = NAN;
    }
    x.q = q, x.scale = scale, x.sum = sum;
    return x;
}

static void free_x(activations *x) {
    free((void *)x->f), free((void *)x->q), free((void *)x->scale), free((void *)x->sum);
}

static double x_value(const activations *x, size_t row, size_t col) {
    const size_t at = row * x->ld + col;
    return x->f ? (double)x->f[at] : (double)x->q[at] * x->scale[at / 32];
}

/* ---- products -------------------------------------------------------------------------------- */

static void check_product(const matrix *m, const matmul_args *a) {
    const size_t n_cols = (size_t)m->n_blocks * 32;
    for (uint32_t i = 0; i < a->m; i++) {
        const size_t x_row = a->x_rows ? (size_t)a->x_rows[i] : i;
        const float *y = a->y + (a->y_rows ? (size_t)a->y_rows[i] : i) * a->y_ld;
        for (uint32_t r = 0; r < a->n_groups * 16; r++) {
            const size_t row = a->first * 16 + r;
            double want = 0, size = 0;
            for (size_t c = 0; c < n_cols; c++) {
                const double x = x_value(&a->x, x_row, c);
                want += m->value[row * n_cols + c] * x;
                size += m->size[row * n_cols + c] * fabs(x);
            }
            CHECK(fabs(y[r] - want) <= size * 3e-6 + 1e-37, "%s y[%u, %u] is %g, not %g",
                  names[m->encoding], i, r, (double)y[r], want);
        }
    }
}

static int32_t *random_rows(uint32_t m, uint32_t rows, int distinct, uint64_t *state) {
    int32_t *list = exact(rows * sizeof *list);
    for (uint32_t i = 0; i < rows; i++) list[i] = (int32_t)(distinct ? i : below(state, rows));
    for (uint32_t i = 0; distinct && i < m; i++) {
        const uint32_t j = i + below(state, rows - i);
        const int32_t swap = list[i];
        list[i] = list[j], list[j] = swap;
    }
    return list;
}

static const uint32_t row_counts[] = {1, 2, 3, 4, 5, 16, 17, 33};

static void test_matmul(const kernels *tables, int n_tables, uint32_t encoding, mood_kind mood,
                        uint32_t n_rows, uint64_t *state) {
    const uint32_t groups = 2 + 2 * below(state, 4), pairs = groups / 2;
    const uint32_t first = 2 * below(state, pairs);
    const uint32_t n_groups = 2 + 2 * below(state, pairs - first / 2);
    const uint32_t n_blocks = is_k(encoding) ? 8 + 8 * below(state, 2) : 1 + below(state, 19);
    const uint32_t extra = below(state, 4), rows = n_rows + extra;
    matrix m = make_matrix(encoding, groups, n_blocks, mood, state);
    activations x = make_x(&m, rows, mood, state);
    int32_t *x_rows = random_rows(n_rows, rows, 0, state);
    int32_t *y_rows = random_rows(n_rows, rows, 1, state);
    const size_t y_ld = n_groups * 16 + below(state, 9), n_y = (rows - 1) * y_ld + n_groups * 16;
    float *want = exact(n_y * sizeof *want), *got = exact(n_y * sizeof *got);
    matmul_args a = {.stripe = m.stripe,
                     .stripe_groups = groups,
                     .first = first,
                     .n_groups = n_groups,
                     .n_blocks = n_blocks,
                     .m = n_rows,
                     .x = x,
                     .x_rows = extra & 1 ? x_rows : NULL,
                     .y_rows = extra & 2 ? y_rows : NULL,
                     .y = want,
                     .y_ld = y_ld};
    memset(want, 0x55, n_y * sizeof *want); /* what is not an output keeps this */
    tables[0].matmul[encoding](&a);
    if (mood != BROKEN) check_product(&m, &a);
    if (mood != BROKEN || !is_k(encoding)) check_dequantised(&m);
    for (int i = 1; i < n_tables; i++) {
        memset(got, 0x55, n_y * sizeof *got);
        a.y = got;
        tables[i].matmul[encoding](&a);
        check_same(want, got, n_y, names[encoding], tables[i].isa);
    }
    free(x_rows), free(y_rows), free(want), free(got);
    free_x(&x);
    free_matrix(&m);
}

/* The first bytes of a 32-row q4_1 stripe, written out by hand. */
static void test_a_hand_written_stripe(void) {
    uint8_t stripe[2 * 320] = {0};
    float row[32];
    stripe[256 + 64 + 4 * 3 + 2] = 0xa7;   /* group 1, row 3: column 10 is 7, column 14 is 10 */
    stripe[512 + 2 * (16 + 3) + 1] = 0x40; /* d of row 19: 2 */
    stripe[512 + 64 + 2 * (16 + 3) + 1] = 0xbc; /* m of row 19: -1 */
    stripe_row(CFLOW_Q4_1, stripe, 32, 32, 19, row);
    for (int c = 0; c < 32; c++) {
        const float want = c == 10 ? 13 : c == 14 ? 19 : -1;
        CHECK(row[c] == want, "column %d is %f", c, (double)row[c]);
    }
}

static void test_sizes(void) {
    CHECK(stripe_bytes(CFLOW_Q4_0, 128, 256) == 18432, "a tile");
    CHECK(stripe_bytes(CFLOW_Q4_K, 96, 257) == 2 * 6 * 2368, "padded to whole tiles");
    CHECK(stripe_bytes(CFLOW_Q6_K, 32, 256) == 2 * 3360, "q6_k");
    CHECK(stripe_bytes(CFLOW_F32, 128, 1u << 31) == (uint64_t)1 << 40, "no overflow");
    CHECK(stripe_bytes(CFLOW_N_ENCODINGS, 128, 256) == 0 && stripe_bytes(~0u, 128, 9) == 0,
          "unknown");
    CHECK(n_column_blocks(CFLOW_Q8_0, 33) == 2 && n_column_blocks(CFLOW_Q4_K, 33) == 8, "blocks");
}

int main(void) {
    kernels tables[N_ISAS];
    int n_tables = 0;
    uint64_t state = 11;
    for (int i = 0; i < N_ISAS; i++)
        n_tables += kernels_select(&tables[n_tables], all_isas[i]) == 0;
    test_sizes();
    test_a_hand_written_stripe();
    for (uint32_t encoding = 0; encoding < CFLOW_N_ENCODINGS; encoding++) {
        for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts * N_MOODS; i++) {
            test_matmul(tables, n_tables, encoding, (mood_kind)(i % N_MOODS),
                        row_counts[i / N_MOODS], &state);
        }
        printf("%s: ok on %d instruction sets\n", names[encoding], n_tables);
    }
    return 0;
}
