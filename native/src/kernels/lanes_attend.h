/* Attention over paged KV in vectors of LANES, for the instruction set that includes this.
 *
 * Scores: a lane is a position, K being (head_dim, 32). Values: a lane is a dimension. HEADS heads
 * that share the KV head go together, so each load of K and V serves all of them. */

enum { POSITION_PARTS = 32 / LANES, VALUE_PARTS = 4 };

typedef struct {
    float *o;        /* (n_heads, padded head_dim) sums, not yet divided */
    float *w;        /* (n_heads, 32) */
    float *m, *l;    /* (n_heads,) */
    size_t o_stride; /* head_dim rounded up to LANES */
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

/* Lanes at and past n are 0 and not read. */
static INLINE vf load_kv_n(const uint8_t *base, size_t index, size_t n, cflow_kv_type type) {
    if (n >= LANES) return load_kv(base, index, type);
    uint8_t last[4 * LANES] = {0};
    memcpy(last, base + index * kv_bytes(type), n * kv_bytes(type));
    return load_kv(last, 0, type);
}

/* The block after the one at `start`, or that one: blocks lie anywhere, so the next is fetched from
 * memory while this one is used, K with the scores of the first head and V with its values. */
static INLINE const uint8_t *next_block(const attend_args *a, uint32_t start) {
    return a->blocks[start / 32 + (a->end - start > 32)];
}

/* Softmax of a head's 32 scores, over positions [low, high) of the block: w, and m, l, o moved on.
 */
static INLINE void weigh(const attend_state *s, uint32_t head, const vf *scores, uint32_t low,
                         uint32_t high) {
    vf w[POSITION_PARTS];
    float *weights = s->w + (size_t)head * 32;
    float largest = s->m[head];
    for (uint32_t i = 0; i < POSITION_PARTS; i++) f_store(weights + i * LANES, scores[i]);
    for (uint32_t p = 0; p < low; p++) weights[p] = -INFINITY;
    for (uint32_t p = high; p < 32; p++) weights[p] = -INFINITY;
    vf most = f_set1(largest);
    for (uint32_t i = 0; i < POSITION_PARTS; i++) most = f_max(f_load(weights + i * LANES), most);
    largest = f_reduce_max(most);
    for (uint32_t i = 0; i < POSITION_PARTS; i++) {
        w[i] = f_exp(f_load(weights + i * LANES) - f_set1(largest));
        f_store(weights + i * LANES, w[i]);
    }
    const vf c = f_exp(f_set1(s->m[head]) - f_set1(largest));
    for (uint32_t i = 0; i < PARTS; i++) w[i] = w[i] + w[i + PARTS];
    s->m[head] = largest;
    s->l[head] = fmaf(s->l[head], f_first(c), fold16(w));
    float *o = s->o + head * s->o_stride;
    for (size_t d = 0; d < s->o_stride; d += LANES) f_store(o + d, f_load(o + d) * c);
}

static INLINE void score_heads(const attend_args *a, const attend_state *s, uint32_t start,
                               uint32_t head, const uint32_t n, cflow_kv_type type) {
    const uint8_t *k = a->blocks[start / 32];
    const float *q = a->q + (size_t)head * a->head_dim;
    const uint32_t low = a->first > start ? a->first - start : 0;
    const uint32_t high = a->end - start < 32 ? a->end - start : 32;
    vf scores[HEADS][POSITION_PARTS];
    for (uint32_t h = 0; h < n; h++) {
        for (uint32_t i = 0; i < POSITION_PARTS; i++) scores[h][i] = f_set1(0);
    }
    const uint8_t *next = next_block(a, start);
    for (size_t d = 0; d < a->head_dim; d++) {
        vf keys[POSITION_PARTS];
        if (head == 0) fetch(next, 32 * kv_bytes(type), d * 32 * kv_bytes(type));
        for (uint32_t i = 0; i < POSITION_PARTS; i++)
            keys[i] = load_kv(k, d * 32 + i * LANES, type);
        for (uint32_t h = 0; h < n; h++) {
            const vf query = f_set1(q[h * a->head_dim + d]);
            for (uint32_t i = 0; i < POSITION_PARTS; i++) {
                scores[h][i] = f_fma(query, keys[i], scores[h][i]);
            }
        }
    }
    const uint8_t *k_scales = k + (size_t)a->head_dim * 64;
    for (uint32_t h = 0; h < n; h++) {
        for (uint32_t i = 0; i < POSITION_PARTS; i++) {
            scores[h][i] = scores[h][i] * f_set1(a->scale);
            if (type == CFLOW_KV_Q8) {
                scores[h][i] = scores[h][i] * f_of_f32(k_scales + i * LANES * 4);
            }
        }
        weigh(s, head + h, scores[h], low, high);
        if (type != CFLOW_KV_Q8) continue;
        float *w = s->w + (size_t)(head + h) * 32;
        for (uint32_t i = 0; i < 32; i += LANES) {
            f_store(w + i, f_load(w + i) * f_of_f32(k_scales + 128 + i * 4));
        }
    }
}

/* `parts` vectors of dimensions from d on, for n heads: as many sums that wait for nothing but
 * themselves. */
static INLINE void add_dimensions(const attend_args *a, const attend_state *s, uint32_t start,
                                  uint32_t head, const uint32_t n, size_t d, const uint32_t parts,
                                  cflow_kv_type type) {
    const size_t head_dim = a->head_dim, v_at = head_dim * 32 * kv_bytes(type);
    const uint8_t *v = a->blocks[start / 32] + v_at, *next = next_block(a, start) + v_at;
    const uint32_t low = a->first > start ? a->first - start : 0;
    const uint32_t high = a->end - start < 32 ? a->end - start : 32;
    const float *w = s->w + (size_t)head * 32;
    float *o = s->o + head * s->o_stride + d;
    vf sum[HEADS][VALUE_PARTS];
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t i = 0; i < parts; i++) sum[h][i] = f_load(o + h * s->o_stride + i * LANES);
    for (size_t p = low; p < high; p++) {
        if (head == 0)
            fetch(next, parts * LANES * kv_bytes(type), (p * head_dim + d) * kv_bytes(type));
        for (uint32_t i = 0; i < parts; i++) {
            const size_t at = d + i * LANES;
            const vf value = parts > 1 ? load_kv(v, p * head_dim + at, type)
                                       : load_kv_n(v, p * head_dim + at, head_dim - at, type);
            for (uint32_t h = 0; h < n; h++)
                sum[h][i] = f_fma(f_set1(w[h * 32 + p]), value, sum[h][i]);
        }
    }
    for (uint32_t h = 0; h < n; h++)
        for (uint32_t i = 0; i < parts; i++) f_store(o + h * s->o_stride + i * LANES, sum[h][i]);
}

static INLINE void add_values(const attend_args *a, const attend_state *s, uint32_t start,
                              uint32_t head, const uint32_t n, cflow_kv_type type) {
    size_t d = 0;
    for (; d + VALUE_PARTS * LANES <= a->head_dim; d += VALUE_PARTS * LANES)
        add_dimensions(a, s, start, head, n, d, VALUE_PARTS, type);
    for (; d < a->head_dim; d += LANES) add_dimensions(a, s, start, head, n, d, 1, type);
}

static INLINE void attend_heads(const attend_args *a, const attend_state *s, uint32_t start,
                                uint32_t head, const uint32_t n, cflow_kv_type type) {
    score_heads(a, s, start, head, n, type);
    add_values(a, s, start, head, n, type);
}

/* All heads meet a block while the first-level cache holds it. */
static INLINE void attend_all(const attend_args *a, const attend_state *s, cflow_kv_type type) {
    for (uint32_t start = a->first / 32 * 32; start < a->end; start += 32) {
        uint32_t head = 0;
        for (; head + HEADS <= a->n_heads; head += HEADS)
            attend_heads(a, s, start, head, HEADS, type);
        const uint32_t rest = a->n_heads - head;
        if (HEADS > 3 && rest == 3) attend_heads(a, s, start, head, 3, type);
        if (HEADS > 2 && rest == 2) attend_heads(a, s, start, head, 2, type);
        if (HEADS > 1 && rest == 1) attend_heads(a, s, start, head, 1, type);
    }
}

static void attend(const attend_args *a) {
    const size_t n_heads = a->n_heads, stride = ((size_t)a->head_dim + LANES - 1) / LANES * LANES;
    float *w = a->scratch + n_heads * stride;
    const attend_state s = {
        .o = a->scratch, .w = w, .m = w + n_heads * 32, .l = w + n_heads * 33, .o_stride = stride};
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
