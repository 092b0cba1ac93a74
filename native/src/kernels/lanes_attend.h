/* Attention over KV blocks in vectors of LANES floats; see lanes.h.
 *
 * For scores a lane is a position, since K is (head_dim, 32); for values a lane is a dimension. Up
 * to HEADS query heads are computed together, so that each load of K and V serves all of them. With
 * AVX2 their sums, their operands and one vector of K or V fill the 16 registers. */

enum { POSITION_PARTS = 32 / LANES, VALUE_PARTS = 4 };

typedef struct {
    float *o;         /* (n_heads, o_stride) sums, not yet divided by l */
    float *w;         /* (n_heads, 32) scores, then weights, of the current block */
    float *m, *l, *c; /* (n_heads,) as in kernels.h */
    size_t o_stride;  /* head_dim rounded up to LANES */
} attend_state;

static INLINE vf load_kv(const uint8_t *base, size_t index, cflow_kv_type type) {
    if (type == CFLOW_KV_F32) return f_of_f32(base + index * 4);
    if (type == CFLOW_KV_BF16) return f_of_bf16(base + index * 2);
    if (type == CFLOW_KV_Q8) return f_of_int(i_of_i8(base + index));
    return f_of_f16(base + index * 2);
}

static INLINE size_t kv_bytes(cflow_kv_type type) {
    return type == CFLOW_KV_F32 ? 4 : type == CFLOW_KV_Q8 ? 1 : 2;
}

/* The first n lanes; the others are 0 and are not read. */
static INLINE vf load_kv_n(const uint8_t *base, size_t index, size_t n, cflow_kv_type type) {
    if (n >= LANES) return load_kv(base, index, type);
    uint8_t last[4 * LANES] = {0};
    memcpy(last, base + index * kv_bytes(type), n * kv_bytes(type));
    return load_kv(last, 0, type);
}

/* A pass of some heads over half a KV block, its K or its V. Each of the n passes prefetches its
 * share of the next half, which may be anywhere in memory. */
typedef struct {
    uint32_t head;     /* the first head */
    uint32_t index, n; /* of n passes */
} pass;

/* The half after K or V of the block at position `start`: V of this block, or K of the next block
 * (of this one if it is the last). */
static INLINE const uint8_t *half_ahead(const attend_args *a, uint32_t start, int at_values,
                                        cflow_kv_type type) {
    if (at_values) return a->blocks[start / 32 + (a->end - start > 32)];
    return a->blocks[start / 32] + (size_t)a->head_dim * 32 * kv_bytes(type);
}

/* Writes the products q K of a block for n heads to w. */
static INLINE void score_heads(const attend_args *a, const attend_state *s, uint32_t start,
                               pass turn, const uint32_t n, cflow_kv_type type) {
    const size_t head_dim = a->head_dim, stride = 32 * kv_bytes(type) / turn.n;
    const uint8_t *k = a->blocks[start / 32];
    const uint8_t *ahead = half_ahead(a, start, 0, type) + turn.index * stride * head_dim;
    const float *q = a->q + turn.head * head_dim;
    float *w = s->w + (size_t)turn.head * 32;
    vf sum[HEADS][POSITION_PARTS];
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t i = 0; i < POSITION_PARTS; i++) sum[h][i] = f_set1(0);
    for (size_t d = 0; d < head_dim; d++) {
        vf query[HEADS];
        fetch(ahead, 32 * kv_bytes(type), d * stride);
        for (uint32_t h = 0; h < n; h++) query[h] = f_set1(q[h * head_dim + d]);
        for (uint32_t i = 0; i < POSITION_PARTS; i++) {
            const vf keys = load_kv(k, d * 32 + i * LANES, type);
            for (uint32_t h = 0; h < n; h++) sum[h][i] = f_fma(query[h], keys, sum[h][i]);
        }
    }
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t i = 0; i < POSITION_PARTS; i++) f_store(w + h * 32 + i * LANES, sum[h][i]);
}

static INLINE void cap_scores(vf x[POSITION_PARTS], float cap) {
    for (uint32_t i = 0; i < POSITION_PARTS; i++) {
        const vf e = f_exp(x[i] * f_set1(2 / cap));
        x[i] = f_set1(cap) - f_set1(2 * cap) / (f_set1(1.0f) + e);
    }
}

/* Online softmax of a head's scores in a block: turns w into the weights of the values and sets c,
 * the factor of o. Not inlined, so that its constants do not take registers from the loops around.
 */
static __attribute__((noinline)) void weigh(const attend_args *a, const attend_state *s,
                                            uint32_t start, uint32_t head) {
    const int is_q8 = a->kv_type == CFLOW_KV_Q8;
    const uint8_t *scales = a->blocks[start / 32] + (size_t)a->head_dim * 64;
    float *w = s->w + (size_t)head * 32;
    vf x[POSITION_PARTS];
    for (uint32_t i = 0; i < POSITION_PARTS; i++) {
        x[i] = f_load(w + i * LANES) * f_set1(a->scale);
        if (is_q8) x[i] = x[i] * f_of_f32(scales + i * LANES * 4);
    }
    if (a->cap > 0) cap_scores(x, a->cap);
    if (a->first > start || a->end - start < 32) {
        for (uint32_t i = 0; i < POSITION_PARTS; i++) f_store(w + i * LANES, x[i]);
        for (uint32_t p = 0; p < 32; p++)
            if (start + p < a->first || start + p >= a->end) w[p] = -INFINITY;
        for (uint32_t i = 0; i < POSITION_PARTS; i++) x[i] = f_load(w + i * LANES);
    }
    const vf before = f_set1(s->m[head]);
    vf most = before;
    for (uint32_t i = 0; i < POSITION_PARTS; i++) most = f_max(x[i], most);
    s->m[head] = f_reduce_max(most);
    most = f_set1(s->m[head]);
    for (uint32_t i = 0; i < POSITION_PARTS; i++) {
        x[i] = f_exp(x[i] - most);
        vf weight = x[i];
        if (is_q8) weight = weight * f_of_f32(scales + 128 + i * LANES * 4);
        f_store(w + i * LANES, weight);
    }
    s->c[head] = f_first(f_exp(before - most));
    for (uint32_t i = 0; i < PARTS; i++) x[i] = x[i] + x[i + PARTS];
    s->l[head] = fmaf(s->l[head], s->c[head], fold16(x));
}

/* Adds the weighted values of a block to `parts` vectors of dimensions, from dimension d on. */
static INLINE void add_dimensions(const attend_args *a, const attend_state *s, uint32_t start,
                                  pass turn, const uint32_t n, size_t d, const uint32_t parts,
                                  cflow_kv_type type) {
    const size_t head_dim = a->head_dim, bytes = kv_bytes(type);
    const size_t stride = parts * LANES * bytes / turn.n;
    const uint8_t *v = a->blocks[start / 32] + head_dim * 32 * bytes;
    const uint8_t *ahead =
        half_ahead(a, start, 1, type) + (head_dim * turn.index / turn.n + d / turn.n) * 32 * bytes;
    const uint32_t low = a->first > start ? a->first - start : 0;
    const uint32_t high = a->end - start < 32 ? a->end - start : 32;
    const float *w = s->w + (size_t)turn.head * 32;
    float *o = s->o + turn.head * s->o_stride + d;
    vf sum[HEADS][VALUE_PARTS];
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t i = 0; i < parts; i++)
            sum[h][i] = f_load(o + h * s->o_stride + i * LANES) * f_set1(s->c[turn.head + h]);
    for (size_t p = low; p < high; p++) {
        vf weight[HEADS];
        fetch(ahead, parts * LANES * bytes, p * stride);
        for (uint32_t h = 0; h < n; h++) weight[h] = f_set1(w[h * 32 + p]);
        for (uint32_t i = 0; i < parts; i++) {
            const size_t at = d + i * LANES;
            const vf value = parts > 1 ? load_kv(v, p * head_dim + at, type)
                                       : load_kv_n(v, p * head_dim + at, head_dim - at, type);
            for (uint32_t h = 0; h < n; h++) sum[h][i] = f_fma(weight[h], value, sum[h][i]);
        }
    }
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t i = 0; i < parts; i++) f_store(o + h * s->o_stride + i * LANES, sum[h][i]);
}

static INLINE void add_values(const attend_args *a, const attend_state *s, uint32_t start,
                              pass turn, const uint32_t n, cflow_kv_type type) {
    size_t d = 0;
    for (; d + VALUE_PARTS * LANES <= a->head_dim; d += VALUE_PARTS * LANES)
        add_dimensions(a, s, start, turn, n, d, VALUE_PARTS, type);
    for (; d < a->head_dim; d += LANES) add_dimensions(a, s, start, turn, n, d, 1, type);
}

static INLINE void attend_heads(const attend_args *a, const attend_state *s, uint32_t start,
                                pass turn, const uint32_t n, int at_values, cflow_kv_type type) {
    if (at_values)
        add_values(a, s, start, turn, n, type);
    else
        score_heads(a, s, start, turn, n, type);
}

/* All heads over half a block, while it is in the first-level cache, in passes of nearly equal
 * size.
 */
static INLINE void attend_half(const attend_args *a, const attend_state *s, uint32_t start,
                               int at_values, cflow_kv_type type) {
    pass turn = {.n = (a->n_heads + HEADS - 1) / HEADS};
    for (uint32_t n; turn.index < turn.n; turn.index++, turn.head += n) {
        n = (a->n_heads + turn.index) / turn.n;
        if (HEADS > 3 && n == 4) attend_heads(a, s, start, turn, 4, at_values, type);
        if (HEADS > 2 && n == 3) attend_heads(a, s, start, turn, 3, at_values, type);
        if (HEADS > 1 && n == 2) attend_heads(a, s, start, turn, 2, at_values, type);
        if (n == 1) attend_heads(a, s, start, turn, 1, at_values, type);
    }
}

static INLINE void attend_all(const attend_args *a, const attend_state *s, cflow_kv_type type) {
    for (uint32_t start = a->first / 32 * 32; start < a->end; start += 32) {
        attend_half(a, s, start, 0, type);
        for (uint32_t head = 0; head < a->n_heads; head++) weigh(a, s, start, head);
        attend_half(a, s, start, 1, type);
    }
}

static void attend(const attend_args *a) {
    const size_t n_heads = a->n_heads, stride = ((size_t)a->head_dim + LANES - 1) / LANES * LANES;
    float *w = a->scratch + n_heads * stride;
    const attend_state s = {
        .o = a->scratch, .w = w, .m = a->m, .l = a->l, .c = w + n_heads * 32, .o_stride = stride};
    memset(s.o, 0, n_heads * stride * sizeof *s.o);
    for (size_t h = 0; h < n_heads; h++) s.m[h] = -INFINITY, s.l[h] = 0;
    if (a->kv_type == CFLOW_KV_F16) attend_all(a, &s, CFLOW_KV_F16);
    if (a->kv_type == CFLOW_KV_F32) attend_all(a, &s, CFLOW_KV_F32);
    if (a->kv_type == CFLOW_KV_BF16) attend_all(a, &s, CFLOW_KV_BF16);
    if (a->kv_type == CFLOW_KV_Q8) attend_all(a, &s, CFLOW_KV_Q8);
    for (size_t h = 0; h < n_heads; h++) {
        const float *sums = s.o + h * stride;
        float *o = a->o + h * a->head_dim;
        for (size_t d = 0; d < a->head_dim; d++) o[d] = sums[d] / s.l[h];
    }
}
