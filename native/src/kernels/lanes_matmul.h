/* Matrix products in vectors of LANES matrix rows; see lanes.h.
 *
 * The stripe is walked in memory order, quant block by quant block, for up to BATCH rows of x at a
 * time. Their columns of the block are packed once. Then, chunk by chunk (UNITS vectors of matrix
 * rows), the codes are decoded into registers and multiplied with every row of x. The sums are in
 * acc, which stays in the first-level cache. The float sequence of a row does not depend on m.
 *
 * Weights are prefetched about AHEAD bytes before their use, in rising order and past the end of
 * the stripe, where the next one begins. On one Zen 5 core with AVX-512 (39 GB/s by the probe),
 * q4_0 is read from RAM at 37-38 GB/s   like this 35           prefetched field by field, in the
 * order of use 33           twice as far ahead 31           into the second-level cache 23 without
 * prefetching */

enum { BATCH = 32, AHEAD = 8192 };

/* A quant block of one row of x, packed for the integer forms. */
typedef struct {
    xi q[8]; /* codes, 4 columns each */
    xf scale;
    xf scaled_sum; /* scale * (float)(sum of the 32 codes) */
    xi start[2];   /* -bias * sum of the codes: all 32 in [0]; for q6_k, 16 in each */
} x_block;

/* One chunk of one quant block, for m rows of x. */
typedef struct {
    const matmul_args *args;
    const uint8_t *head, *block; /* first bytes of the tile and of the block */
    size_t group;                /* even; the chunk is in this group and the next */
    uint32_t lane;               /* its first row, from the first row of `group` */
    uint32_t column;             /* the block's first column in the matrix */
    uint32_t row, m;             /* rows [row, row + m) of x */
    const x_block *x;            /* (m,) */
    float *acc;                  /* (m, chunk lanes) */
} chunk;

typedef struct {
    uint32_t head, block; /* encoding_size of layout.h */
    uint32_t chunk;       /* matrix rows of a chunk */
    int bias;             /* -1: a float form, for which x is not packed */
    int halves;           /* 1: there is a start for each 16 columns */
    int has_m;            /* 1: scaled_sum is used */
} form;

static INLINE size_t x_row_of(const matmul_args *a, uint32_t i) {
    return a->x_rows ? (size_t)a->x_rows[i] : i;
}

/* Packs the 32 elements of x from `at` on. */
static INLINE void pack(const activations *x, size_t at, const form f, x_block *out) {
    const int32_t *sum = x->sum + at / 16;
    const float scale = x->scale[at / 32];
    for (int j = 0; j < 8; j++) out->q[j] = spread_four(x->q + at + 4 * j);
    out->scale = spread_f(scale);
    if (f.has_m) out->scaled_sum = spread_f(scale * (float)(sum[0] + sum[1]));
    out->start[0] = spread_i(-f.bias * (f.halves ? sum[0] : sum[0] + sum[1]));
    if (f.halves) out->start[1] = spread_i(-f.bias * sum[1]);
}

static INLINE void store_rows(const matmul_args *a, uint32_t row, uint32_t m, uint32_t chunk_rows,
                              const float *acc) {
    const uint32_t lanes = a->n_groups * 16;
    for (uint32_t i = 0; i < m; i++) {
        const size_t y_row = a->y_rows ? (size_t)a->y_rows[row + i] : row + i;
        float *y = a->y + y_row * a->y_ld;
        for (uint32_t lane = 0; lane < lanes; lane += LANES) {
            const uint32_t in_chunk = lane % chunk_rows;
            f_store(y + lane,
                    f_load(acc + (size_t)(lane - in_chunk) * m + i * chunk_rows + in_chunk));
        }
    }
}

static INLINE void fetch(const uint8_t *from, size_t bytes, size_t ahead) {
    const uintptr_t at =
        (uintptr_t)from + ahead; /* may be past the buffer; it is not dereferenced */
    for (size_t i = 0; i < bytes; i += 64) _mm_prefetch((const char *)(at + i), _MM_HINT_T0);
}

static INLINE void walk_rows(const matmul_args *a, const form f, void (*add)(const chunk *),
                             uint32_t row, uint32_t m) {
    alignas(64) float acc[128 * BATCH];
    alignas(64) x_block x[BATCH];
    size_t x_at[BATCH];
    const size_t end = a->first + a->n_groups;
    const size_t head_bytes = (size_t)a->stripe_groups * f.head;
    const size_t block_bytes = (size_t)a->stripe_groups * f.block;
    const size_t ahead = (AHEAD + block_bytes - 1) / block_bytes * block_bytes;
    for (uint32_t i = 0; i < m; i++) x_at[i] = x_row_of(a, row + i) * a->x.ld;
    memset(acc, 0, sizeof *acc * a->n_groups * 16 * m);
    chunk p = {.args = a, .head = a->stripe, .block = a->stripe, .row = row, .m = m, .x = x};
    for (uint32_t block = 0; block < a->n_blocks; block++) {
        p.column = block * 32;
        if (block % 8 == 0) {
            fetch(p.block, head_bytes, ahead);
            p.head = p.block;
            p.block += head_bytes;
        }
        for (uint32_t i = 0; f.bias >= 0 && i < m; i++) pack(&a->x, x_at[i] + block * 32, f, x + i);
        for (p.group = a->first; p.group < end; p.group += 2) {
            fetch(p.block + p.group * f.block, 2 * f.block, ahead);
#pragma GCC unroll 4 /* all chunks with AVX2, so that offsets of rows are constants */
            for (p.lane = 0; p.lane < 32; p.lane += f.chunk) {
                p.acc = acc + ((p.group - a->first) * 16 + p.lane) * m;
                add(&p);
            }
        }
        p.block += block_bytes;
    }
    store_rows(a, row, m, f.chunk, acc);
}

/* A single row has its own instance of the code, which keeps its packed block in registers. */
static INLINE void walk(const matmul_args *a, const form f, void (*add)(const chunk *)) {
    if (a->m == 1) {
        walk_rows(a, f, add, 0, 1);
        return;
    }
    for (uint32_t row = 0; row < a->m; row += BATCH) {
        walk_rows(a, f, add, row, a->m - row < BATCH ? a->m - row : BATCH);
    }
}

/* ---- integer forms --------------------------------------------------------------------------- */

enum { CHUNK = UNITS * LANES };

/* The first codes of unit u of the chunk; group_bytes: bytes of a group's codes. */
static INLINE const uint8_t *unit_codes(const chunk *p, const uint8_t *codes, uint32_t u,
                                        size_t group_bytes) {
    const uint32_t lane = p->lane + u * LANES;
    return codes + (p->group + lane / 16) * group_bytes + lane % 16 * 4;
}

/* The first row of unit u in the stripe. */
static INLINE size_t unit_row(const chunk *p, uint32_t u) {
    return p->group * 16 + p->lane + u * LANES;
}

static INLINE void nibbles(const chunk *p, vi w[UNITS][8]) {
    for (uint32_t u = 0; u < UNITS; u++) {
        const uint8_t *unit = unit_codes(p, p->block, u, 256);
        for (int v = 0; v < 4; v++) {
            const vi both = i_load(unit + 64 * v);
            w[u][2 * v] = low_nibbles(both);
            w[u][2 * v + 1] = high_nibbles(both);
        }
    }
}

/* acc = fma((float)isum, d * x.scale, acc); then, unless m is NULL,
 * acc = fma(m, x.scaled_sum, acc). */
static INLINE void add_rows(const chunk *p, dot_fn dot, const vi w[UNITS][8], const vf d[UNITS],
                            const vf m[UNITS]) {
#pragma GCC unroll 2
    for (uint32_t i = 0; i < p->m; i++) {
        const x_block *x = p->x + i;
        const vf scale = f_of_x(x->scale);
        float *acc = p->acc + (size_t)i * CHUNK;
        vi isum[UNITS];
        dot(isum, w, x->q, x->start[0]);
        for (uint32_t u = 0; u < UNITS; u++) {
            vf sum = f_fma(f_of_int(isum[u]), d[u] * scale, f_load(acc + u * LANES));
            if (m != NULL) sum = f_fma(m[u], f_of_x(x->scaled_sum), sum);
            f_store(acc + u * LANES, sum);
        }
    }
}

static INLINE void load_halves(const chunk *p, const uint8_t *halves, vf out[UNITS]) {
    for (uint32_t u = 0; u < UNITS; u++) out[u] = f_of_f16(halves + unit_row(p, u) * 2);
}

static INLINE void add_q4(const chunk *p, int has_m) {
    const size_t rows = (size_t)p->args->stripe_groups * 16;
    const uint8_t *scales = p->block + rows * 16;
    vi w[UNITS][8];
    vf d[UNITS], m[UNITS];
    nibbles(p, w);
    load_halves(p, scales, d);
    if (has_m) load_halves(p, scales + rows * 2, m);
    add_rows(p, dot_nibbles, w, d, has_m ? m : NULL);
}

static INLINE void add_q8(const chunk *p, int has_m) {
    const size_t rows = (size_t)p->args->stripe_groups * 16;
    const uint8_t *scales = p->block + rows * 32;
    vi w[UNITS][8];
    vf d[UNITS], m[UNITS];
    for (uint32_t u = 0; u < UNITS; u++) {
        const uint8_t *unit = unit_codes(p, p->block, u, 512);
        for (int j = 0; j < 8; j++) w[u][j] = byte_codes(i_load(unit + 64 * j));
    }
    load_halves(p, scales, d);
    if (has_m) load_halves(p, scales + rows * 2, m);
    add_rows(p, dot_bytes, w, d, has_m ? m : NULL);
}

static INLINE void add_q4_0(const chunk *p) {
    add_q4(p, 0);
}
static INLINE void add_q4_1(const chunk *p) {
    add_q4(p, 1);
}
static INLINE void add_q8_0(const chunk *p) {
    add_q8(p, 0);
}
static INLINE void add_q8_1(const chunk *p) {
    add_q8(p, 1);
}

static INLINE void add_q4_k(const chunk *p) {
    const size_t rows = (size_t)p->args->stripe_groups * 16;
    const uint8_t *scales = p->block + rows * 16;
    vi w[UNITS][8];
    vf d[UNITS], m[UNITS];
    nibbles(p, w);
    load_halves(p, p->head, d);
    load_halves(p, p->head + rows * 2, m);
    for (uint32_t u = 0; u < UNITS; u++) {
        const size_t row = unit_row(p, u);
        d[u] = d[u] * f_of_int(i_of_u8(scales + row));
        m[u] = -(m[u] * f_of_int(i_of_u8(scales + rows + row)));
    }
    add_rows(p, dot_nibbles, w, d, m);
}

static INLINE void six_bits(const chunk *p, vi w[UNITS][8]) {
    const uint8_t *pairs = p->block + (size_t)p->args->stripe_groups * 256;
    nibbles(p, w);
    for (uint32_t u = 0; u < UNITS; u++) {
        const uint8_t *unit = unit_codes(p, pairs, u, 128);
        for (int half = 0; half < 2; half++) {
            const vi four = i_load(unit + 64 * half);
            for (int k = 0; k < 4; k++) {
                w[u][4 * half + k] = i_or(w[u][4 * half + k], upper_pair(four, k));
            }
        }
    }
}

static INLINE void add_q6_k(const chunk *p) {
    const size_t rows = (size_t)p->args->stripe_groups * 16;
    const uint8_t *scales = p->block + rows * 24;
    vi w[UNITS][8];
    vf d[2][UNITS];
    six_bits(p, w);
    for (uint32_t u = 0; u < UNITS; u++) {
        const size_t row = unit_row(p, u);
        const vf scale = f_of_f16(p->head + row * 2);
        d[0][u] = scale * f_of_int(i_of_i8(scales + row));
        d[1][u] = scale * f_of_int(i_of_i8(scales + rows + row));
    }
    for (uint32_t i = 0; i < p->m; i++) {
        const x_block *x = p->x + i;
        const vf scale = f_of_x(x->scale);
        float *acc = p->acc + (size_t)i * CHUNK;
        vi isum[2][UNITS];
        dot_sixes(isum[0], w, 0, x->q, x->start[0]);
        dot_sixes(isum[1], w, 4, x->q + 4, x->start[1]);
        for (uint32_t u = 0; u < UNITS; u++) {
            vf sum = f_fma(f_of_int(isum[0][u]), d[0][u] * scale, f_load(acc + u * LANES));
            sum = f_fma(f_of_int(isum[1][u]), d[1][u] * scale, sum);
            f_store(acc + u * LANES, sum);
        }
    }
}

/* ---- float forms ----------------------------------------------------------------------------- */

enum { FLOAT_CHUNK = 2 * LANES };

static INLINE const uint8_t *float_unit(const chunk *p, uint32_t u, uint32_t bytes) {
    const uint32_t lane = p->lane + u * LANES;
    return p->block + ((p->group + lane / 16) * 512 + lane % 16) * bytes;
}

/* acc = fma(w, x, acc) column by column, for n rows of x from p->row + i on. */
static INLINE void add_float_rows(const chunk *p, vf (*widen)(const uint8_t *), uint32_t bytes,
                                  uint32_t i, const uint32_t n) {
    const uint8_t *w0 = float_unit(p, 0, bytes), *w1 = float_unit(p, 1, bytes);
    float *acc = p->acc + (size_t)i * FLOAT_CHUNK;
    const float *x[4];
    vf sum[4][2];
    for (uint32_t r = 0; r < n; r++) {
        x[r] = p->args->x.f + x_row_of(p->args, p->row + i + r) * p->args->x.ld + p->column;
        for (int u = 0; u < 2; u++) sum[r][u] = f_load(acc + r * FLOAT_CHUNK + u * LANES);
    }
    for (size_t col = 0; col < 32; col++) {
        const size_t at = col * 16 * bytes;
        const vf weights[2] = {widen(w0 + at), widen(w1 + at)};
        for (uint32_t r = 0; r < n; r++) {
            const vf value = f_set1(x[r][col]);
            for (int u = 0; u < 2; u++) sum[r][u] = f_fma(weights[u], value, sum[r][u]);
        }
    }
    for (uint32_t r = 0; r < n; r++) {
        for (int u = 0; u < 2; u++) f_store(acc + r * FLOAT_CHUNK + u * LANES, sum[r][u]);
    }
}

static INLINE void add_floats(const chunk *p, vf (*widen)(const uint8_t *), uint32_t bytes) {
    uint32_t i = 0;
    for (; i + 4 <= p->m; i += 4) add_float_rows(p, widen, bytes, i, 4);
    if (p->m - i == 3) add_float_rows(p, widen, bytes, i, 3);
    if (p->m - i == 2) add_float_rows(p, widen, bytes, i, 2);
    if (p->m - i == 1) add_float_rows(p, widen, bytes, i, 1);
}

static INLINE void add_f32(const chunk *p) {
    add_floats(p, f_of_f32, 4);
}
static INLINE void add_f16(const chunk *p) {
    add_floats(p, f_of_f16, 2);
}
static INLINE void add_bf16(const chunk *p) {
    add_floats(p, f_of_bf16, 2);
}

/* ---- entries --------------------------------------------------------------------------------- */

static void matmul_f32(const matmul_args *a) {
    walk(a, (form){.block = 2048, .chunk = FLOAT_CHUNK, .bias = -1}, add_f32);
}
static void matmul_f16(const matmul_args *a) {
    walk(a, (form){.block = 1024, .chunk = FLOAT_CHUNK, .bias = -1}, add_f16);
}
static void matmul_bf16(const matmul_args *a) {
    walk(a, (form){.block = 1024, .chunk = FLOAT_CHUNK, .bias = -1}, add_bf16);
}
static void matmul_q4_0(const matmul_args *a) {
    walk(a, (form){.block = 288, .chunk = CHUNK, .bias = NIBBLE_BIAS}, add_q4_0);
}
static void matmul_q4_1(const matmul_args *a) {
    walk(a, (form){.block = 320, .chunk = CHUNK, .has_m = 1}, add_q4_1);
}
static void matmul_q8_0(const matmul_args *a) {
    walk(a, (form){.block = 544, .chunk = CHUNK, .bias = BYTE_BIAS}, add_q8_0);
}
static void matmul_q8_1(const matmul_args *a) {
    walk(a, (form){.block = 576, .chunk = CHUNK, .bias = BYTE_BIAS, .has_m = 1}, add_q8_1);
}
static void matmul_q4_k(const matmul_args *a) {
    walk(a, (form){.head = 64, .block = 288, .chunk = CHUNK, .has_m = 1}, add_q4_k);
}
static void matmul_q6_k(const matmul_args *a) {
    walk(a, (form){.head = 32, .block = 416, .chunk = CHUNK, .bias = 32, .halves = 1}, add_q6_k);
}
