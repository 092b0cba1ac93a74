#include "attention.h"

#include <math.h>
#include <string.h>

/* ---- rotary position embedding ---- */

/* The frequency of a rotation after scaling. Linear: divided by the factor. Llama 3 (its
 * apply_scaling): divided by the factor below low_freq turns in the original context, unchanged
 * above high_freq turns, blended linearly between. */
static double scaled_frequency(const cflow_layer *l, double frequency) {
    if (l->rope_scaling == CFLOW_ROPE_LINEAR) return frequency / l->rope_factor;
    if (l->rope_scaling != CFLOW_ROPE_LLAMA3) return frequency;
    const double turns = l->rope_original_context * frequency / (2 * 3.14159265358979323846);
    if (turns < l->rope_low_freq) return frequency / l->rope_factor;
    if (turns > l->rope_high_freq) return frequency;
    const double blend =
        (turns - l->rope_low_freq) / ((double)l->rope_high_freq - l->rope_low_freq);
    return (1 - blend) * frequency / l->rope_factor + blend * frequency;
}

const float *rope_divisors(const model_weights *m, uint32_t layer, uint32_t context) {
    const matrix *of_all = model_matrix(m, layer, CFLOW_ROPE_DIVISORS);
    const matrix *of_long = model_matrix(m, layer, CFLOW_ROPE_DIVISORS_LONG);
    const int is_long = context > model_layer(m, layer)->rope_original_context;
    const matrix *chosen = is_long && of_long->n_cols ? of_long : of_all;
    return chosen->n_cols && !m->header_only ? matrix_vector(chosen) : NULL;
}

void rope_table(const cflow_layer *l, const float *divisors, uint32_t context, float *table) {
    const uint32_t half = l->rope_dim / 2;
    const double gain = l->rope_gain > 0 ? l->rope_gain : 1;
    for (uint32_t i = 0; i < half; i++) {
        double f = scaled_frequency(l, pow(l->rope_base, -2.0 * i / l->rope_dim));
        if (divisors) f /= divisors[i];
        for (uint32_t p = 0; p < context; p++) {
            table[(size_t)p * 2 * half + i] = (float)(gain * cos(p * f));
            table[(size_t)p * 2 * half + half + i] = (float)(gain * sin(p * f));
        }
    }
}

/* Rotates the first rope_dim dimensions of a head x. table: cosines and sines of its position. */
static void rotate(const cflow_layer *l, const float *table, float *x) {
    const uint32_t half = l->rope_dim / 2;
    const uint32_t stride = l->rope_kind == CFLOW_ROPE_HALF ? 1 : 2;
    const uint32_t pair = l->rope_kind == CFLOW_ROPE_HALF ? half : 1;
    if (l->rope_kind == CFLOW_ROPE_NONE) return;
    for (uint32_t i = 0; i < half; i++) {
        float *a = x + i * stride, *b = a + pair;
        const float c = table[i], s = table[half + i], x0 = *a, x1 = *b;
        *a = x0 * c - x1 * s;
        *b = x1 * c + x0 * s;
    }
}

/* ---- KV blocks ---- */

/* Bytes of a stored element. */
static size_t kv_element(int32_t kv_type) {
    return kv_type == CFLOW_KV_F32 ? 4 : kv_type == CFLOW_KV_Q8 ? 1 : 2;
}

size_t kv_head_bytes(const cflow_layer *l, int32_t kv_type) {
    const size_t codes = 2 * CFLOW_KV_BLOCK * (size_t)l->head_dim * kv_element(kv_type);
    const size_t scales = kv_type == CFLOW_KV_Q8 ? 2 * CFLOW_KV_BLOCK * sizeof(float) : 0;
    return round_up(codes + scales, 64);
}

/* The bytes of one KV head in a block. */
static uint8_t *kv_head(const cflow_ctx *ctx, uint32_t layer, int32_t block, uint32_t head) {
    return ctx->kv + (size_t)block * ctx->block_bytes + ctx->layer_offset[layer] +
           head * ctx->head_bytes[layer];
}

static uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Stores x (n,) from element `at` on, `stride` elements apart. q8 also stores the scale amax / 127.
 */
static void kv_store(const cflow_ctx *ctx, uint8_t *codes, float *scale, const float *x, uint32_t n,
                     size_t at, size_t stride) {
    float amax = 0, bad = 0; /* bad: NaN if any x is not finite; the scale is then NaN too */
    float to_codes;
    uint16_t halves[MAX_HEAD_DIM];
    switch ((cflow_kv_type)ctx->options.kv_type) {
    case CFLOW_KV_F32:
        for (uint32_t i = 0; i < n; i++) ((float *)(void *)codes)[at + i * stride] = x[i];
        break;
    case CFLOW_KV_F16:
        ctx->k.f32_to_f16(x, n, halves);
        for (uint32_t i = 0; i < n; i++) ((uint16_t *)(void *)codes)[at + i * stride] = halves[i];
        break;
    case CFLOW_KV_BF16:
        for (uint32_t i = 0; i < n; i++)
            ((uint16_t *)(void *)codes)[at + i * stride] = f32_to_bf16(x[i]);
        break;
    case CFLOW_KV_Q8:
        for (uint32_t i = 0; i < n; i++) {
            amax = fmaxf(amax, fabsf(x[i]));
            bad += x[i] * 0;
        }
        to_codes = 127.0f / amax;
        if (bad != 0 || !isfinite(to_codes)) to_codes = 0; /* amax is 0 or too small to divide by */
        *scale = amax / 127.0f + bad;
        for (uint32_t i = 0; i < n; i++)
            ((int8_t *)codes)[at + i * stride] =
                (int8_t)(to_codes == 0 ? 0 : rintf(x[i] * to_codes));
        break;
    }
}

/* Stores k and v (head_dim,) of a position into its block. K is (head_dim, 32), V (32, head_dim).
 */
static void kv_append(const cflow_ctx *ctx, const cflow_layer *l, uint8_t *head, uint32_t position,
                      const float *k, const float *v) {
    const size_t half = CFLOW_KV_BLOCK * (size_t)l->head_dim * kv_element(ctx->options.kv_type);
    const uint32_t p = position % CFLOW_KV_BLOCK;
    float *scales = (float *)(void *)(head + 2 * half);
    kv_store(ctx, head, scales + p, k, l->head_dim, p, CFLOW_KV_BLOCK);
    kv_store(ctx, head + half, scales + CFLOW_KV_BLOCK + p, v, l->head_dim, (size_t)p * l->head_dim,
             1);
}

/* ---- OP_KV: a unit is one KV head of one row ---- */

/* 1 / sqrt(mean(x^2) + eps) */
static float inverse_rms(const cflow_ctx *ctx, const float *x, uint32_t n, float eps) {
    return 1.0f / sqrtf(ctx->k.sum_squares(x, n) / (float)n + eps);
}

/* Norms and rotates head `head` of a projection x (n_heads, head_dim) into out (head_dim,). */
static void norm_head(const cflow_ctx *ctx, const cflow_layer *l, const float *x,
                      const matrix *weight, float *out) {
    ctx->k.scale_weight(x, inverse_rms(ctx, x, l->head_dim, l->norm_eps), matrix_vector(weight),
                        l->norm_offset, l->head_dim, out);
}

static void prepare_head(const cflow_ctx *ctx, const cflow_layer *l, const float *x,
                         uint32_t n_heads, uint32_t head, const matrix *weight, const float *table,
                         float *out) {
    const uint32_t n = l->head_dim;
    const float *from = x + head * n;
    if (l->qk_norm == CFLOW_QK_NORM_HEAD)
        norm_head(ctx, l, from, weight, out);
    else if (l->qk_norm == CFLOW_QK_NORM_FULL)
        ctx->k.scale_weight(from, inverse_rms(ctx, x, n_heads * n, l->norm_eps),
                            matrix_vector(weight) + head * n, l->norm_offset, n, out);
    else
        memcpy(out, from, n * sizeof *out);
    rotate(l, table, out);
    if (l->qk_norm == CFLOW_QK_NORM_ROTATED) norm_head(ctx, l, out, weight, out);
}

/* Multiplies a query by its growth with the position (Llama 4's attention temperature). */
static void grow_query(const cflow_ctx *ctx, const cflow_layer *l, uint32_t position, float *q) {
    if (!(l->query_growth > 0)) return;
    const uint32_t periods = (position + l->query_start) / l->query_period;
    const float scale = (float)(1 + (double)l->query_growth * log1p(periods));
    ctx->k.scale_weight(q, scale, NULL, 0, l->head_dim, q);
}

span kv_span(const cflow_ctx *ctx, const op *o) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    return (span){.units = ctx->step.n_rows * l->n_kv_heads,
                  .cost = 8ull * l->head_dim * (l->n_heads / l->n_kv_heads + 2)};
}

static void kv_unit(const cflow_ctx *ctx, const op *o, uint32_t row, uint32_t head,
                    float *scratch) {
    const uint32_t layer = (uint32_t)o->layer;
    const cflow_layer *l = model_layer(ctx->weights, layer);
    const cflow_row *r = &ctx->step.rows[row];
    const buffer *q = ctx_buffer(ctx, o->in[0]), *k = ctx_buffer(ctx, o->in[1]);
    const buffer *v = ctx_buffer(ctx, o->in[2]), *q_rot = ctx_buffer(ctx, o->out[0]);
    const uint32_t n = l->head_dim, group = l->n_heads / l->n_kv_heads;
    const float *table =
        ctx->rope[layer] ? ctx->rope[layer] + (size_t)r->position * l->rope_dim : NULL;
    for (uint32_t i = head * group; i < (head + 1) * group; i++) {
        float *out = q_rot->f + row * q_rot->ld + i * n;
        prepare_head(ctx, l, q->f + row * q->ld, l->n_heads, i,
                     model_matrix(ctx->weights, layer, CFLOW_Q_NORM), table, out);
        grow_query(ctx, l, (uint32_t)r->position, out);
    }
    prepare_head(ctx, l, k->f + row * k->ld, l->n_kv_heads, head,
                 model_matrix(ctx->weights, layer, CFLOW_K_NORM), table, scratch);
    const float *v_head = v->f + row * v->ld + head * n;
    if (l->v_norm) {
        ctx->k.scale_weight(v_head, inverse_rms(ctx, v_head, n, l->norm_eps), NULL, 0.0f, n,
                            scratch + n);
        v_head = scratch + n;
    }
    const int32_t *blocks = ctx->tables + (size_t)r->sequence * (size_t)ctx->max_blocks;
    kv_append(ctx, l, kv_head(ctx, layer, blocks[r->position / CFLOW_KV_BLOCK], head),
              (uint32_t)r->position, scratch, v_head);
}

void kv_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread) {
    const uint32_t heads = model_layer(ctx->weights, (uint32_t)o->layer)->n_kv_heads;
    for (uint32_t u = first; u < end; u++)
        kv_unit(ctx, o, u / heads, u % heads, ctx_scratch(ctx, thread));
}

/* ---- OP_ATTEND: a unit is a set of KV heads of one row, or of one part of a row ---- */

/* A row's positions are attended to in parts that begin at multiples of ATTEND_PART. The results of
 * its parts are then added in order: the floats do not depend on which threads computed them. */

/* The smallest set of KV heads whose output is a multiple of 32 wide. */
static uint32_t heads_per_unit(const cflow_layer *l) {
    const uint32_t width = l->n_heads / l->n_kv_heads * l->head_dim;
    for (uint32_t n = 1; n < l->n_kv_heads; n++)
        if (n * width % 32 == 0 && l->n_kv_heads % n == 0) return n;
    return l->n_kv_heads;
}

static uint32_t head_sets(const cflow_layer *l) {
    return l->n_kv_heads / heads_per_unit(l);
}

/* Sets in the layer that has the fewest. */
static uint32_t fewest_sets(const model_weights *m) {
    uint32_t fewest = UINT32_MAX;
    for (uint32_t i = 0; i < m->header.n_layers; i++) {
        const uint32_t sets = head_sets(model_layer(m, i));
        if (sets < fewest) fewest = sets;
    }
    return fewest;
}

/* ---- cutting rows ---- */

static uint64_t n_parts(uint64_t positions) {
    return (positions + ATTEND_PART - 1) / ATTEND_PART;
}

uint64_t attend_cuts(const model_weights *m, const cflow_ctx_options *options) {
    const uint64_t parts = n_parts((uint64_t)options->max_context);
    const uint64_t units = (uint64_t)options->n_threads * CUT_UNITS * parts;
    if (options->n_threads == 1 || parts == 1) return 0;
    const uint64_t by_units = units / fewest_sets(m);
    const uint64_t by_rows = (uint64_t)options->max_rows * parts;
    return by_units < by_rows ? by_units : by_rows;
}

/* The i-th of n rows, taken from both ends in turn. Later rows of a prompt attend to more
 * positions; in this order, runs of equally many rows cost about the same. */
static uint32_t fold(uint32_t i, uint32_t n) {
    return i % 2 ? n - 1 - i / 2 : i / 2;
}

/* Cuts rows if the longest one is at least 1 / CUT_UNITS of a thread's work. */
void attend_divide(cflow_ctx *ctx) {
    step *s = &ctx->step;
    const uint32_t sets = fewest_sets(ctx->weights), n = s->n_rows;
    uint64_t longest = 0, all = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t parts = n_parts((uint64_t)s->rows[i].position + 1);
        if (longest < parts) longest = parts;
        all += parts;
    }
    const uint64_t threads = (uint64_t)ctx->options.n_threads;
    const int cuts = threads > 1 && longest > 1 && all * sets <= longest * CUT_UNITS * threads;
    s->n_row_parts = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t row = fold(i, n);
        const uint32_t parts = cuts ? (uint32_t)n_parts((uint64_t)s->rows[row].position + 1) : 1;
        for (uint32_t part = 0; part < parts; part++)
            ctx->row_parts[s->n_row_parts++] = (row_part){row, part, parts};
    }
}

span attend_span(const cflow_ctx *ctx, const op *o) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const uint64_t positions = ctx->step.attended / ctx->step.n_row_parts + 1;
    return (span){.units = ctx->step.n_row_parts * head_sets(l),
                  .cost = 4 * heads_per_unit(l) * l->head_dim * positions};
}

/* ---- one part of one KV head ---- */

/* Attention of the n query heads of a KV head to some positions: o (n, head_dim), m (n,), l (n,) as
 * in attend_args. */
typedef struct {
    float *o, *m, *l;
} partial;

static size_t partial_floats(const cflow_layer *l) {
    return round_up((size_t)(l->n_heads / l->n_kv_heads) * (l->head_dim + 2), 16);
}

static partial partial_at(const cflow_layer *l, float *at) {
    const size_t n = l->n_heads / l->n_kv_heads;
    return (partial){at, at + n * l->head_dim, at + n * (l->head_dim + 1)};
}

size_t attend_partial_bytes(const model_weights *m) {
    size_t most = 0;
    for (uint32_t i = 0; i < m->header.n_layers; i++) {
        const cflow_layer *l = model_layer(m, i);
        const size_t floats = l->n_kv_heads * partial_floats(l);
        if (most < floats) most = floats;
    }
    return most * sizeof(float);
}

/* Where the result of row part `at` and a KV head is kept. */
static partial kept_partial(const cflow_ctx *ctx, const cflow_layer *l, uint32_t at,
                            uint32_t head) {
    return partial_at(l, ctx->partials + ((size_t)at * l->n_kv_heads + head) * partial_floats(l));
}

/* Adds the attention to later positions to `sum`. With m the larger of both maxima, o becomes the
 * mean of both o, weighted by l exp(m_i - m): online softmax. */
static void add_partial(const cflow_ctx *ctx, const cflow_layer *l, partial sum, partial add) {
    for (uint32_t h = 0; h < l->n_heads / l->n_kv_heads; h++) {
        const float m = sum.m[h] > add.m[h] ? sum.m[h] : add.m[h];
        float a, b;
        ctx->k.exp_shifted(sum.m + h, 1, m, &a);
        ctx->k.exp_shifted(add.m + h, 1, m, &b);
        a *= sum.l[h], b *= add.l[h];
        sum.m[h] = m, sum.l[h] = a + b;
        float *o = sum.o + h * l->head_dim;
        ctx->k.scale_weight(o, a / sum.l[h], NULL, 0, l->head_dim, o);
        ctx->k.add_scaled(o, add.o + h * l->head_dim, b / sum.l[h], l->head_dim, o);
    }
}

typedef struct {
    uint32_t first, end;
} range;

/* The positions that a row attends to. */
static range positions_of(const cflow_layer *l, const cflow_row *r) {
    const uint32_t end = (uint32_t)r->position + 1;
    return (range){l->window && end > l->window ? end - l->window : 0, end};
}

/* The parts that hold positions a row attends to; a window leaves out the first ones. */
static range parts_of(const cflow_layer *l, const cflow_row *r) {
    const range p = positions_of(l, r);
    return (range){p.first / ATTEND_PART, (p.end - 1) / ATTEND_PART + 1};
}

enum { PART_BLOCKS = ATTEND_PART / CFLOW_KV_BLOCK };

/* Attends to the positions of one part with the query heads of one KV head. */
static void attend_part(const cflow_ctx *ctx, const op *o, uint32_t row, uint32_t part,
                        uint32_t head, partial out, float *scratch) {
    const uint32_t layer = (uint32_t)o->layer, start = part * ATTEND_PART;
    const cflow_layer *l = model_layer(ctx->weights, layer);
    const cflow_row *r = &ctx->step.rows[row];
    const buffer *q = ctx_buffer(ctx, o->in[0]);
    const range p = positions_of(l, r);
    const uint32_t group = l->n_heads / l->n_kv_heads;
    const uint32_t first = p.first > start ? p.first - start : 0;
    const uint32_t end = p.end - start < ATTEND_PART ? p.end - start : ATTEND_PART;
    const int32_t *table = ctx->tables + (size_t)r->sequence * (size_t)ctx->max_blocks;
    const uint8_t *blocks[PART_BLOCKS];
    for (uint32_t b = first / CFLOW_KV_BLOCK; b * CFLOW_KV_BLOCK < end; b++)
        blocks[b] = kv_head(ctx, layer, table[part * PART_BLOCKS + b], head);
    ctx->k.attend(&(attend_args){
        .q = q->f + row * q->ld + head * group * l->head_dim,
        .blocks = blocks,
        .n_heads = group,
        .head_dim = l->head_dim,
        .first = first,
        .end = end,
        .scale = l->attention_scale,
        .cap = l->score_cap,
        .kv_type = (cflow_kv_type)ctx->options.kv_type,
        .o = out.o,
        .m = out.m,
        .l = out.l,
        .scratch = scratch,
    });
}

/* ---- units ---- */

/* The output of a KV head's query heads. */
static float *head_out(const cflow_ctx *ctx, const op *o, uint32_t row, uint32_t head) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const buffer *out = ctx_buffer(ctx, o->out[0]);
    return out->f + row * out->ld + (size_t)head * (l->n_heads / l->n_kv_heads) * l->head_dim;
}

/* Attends to all parts of a row, in order. */
static void attend_row(const cflow_ctx *ctx, const op *o, uint32_t row, uint32_t head,
                       float *scratch) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const range parts = parts_of(l, &ctx->step.rows[row]);
    const partial add = partial_at(l, scratch + partial_floats(l));
    float *rest = scratch + 2 * partial_floats(l);
    partial sum = partial_at(l, scratch);
    sum.o = head_out(ctx, o, row, head);
    attend_part(ctx, o, row, parts.first, head, sum, rest);
    for (uint32_t part = parts.first + 1; part < parts.end; part++) {
        attend_part(ctx, o, row, part, head, add, rest);
        add_partial(ctx, l, sum, add);
    }
}

/* Attends to row part `at`. The thread that finishes a row's last part adds its parts and
 * returns 1.
 */
static int attend_cut(const cflow_ctx *ctx, const op *o, uint32_t at, range heads, float *scratch) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const row_part *p = &ctx->row_parts[at];
    const range parts = parts_of(l, &ctx->step.rows[p->row]);
    const uint32_t row_at = at - p->part;
    if (p->part >= parts.first)
        for (uint32_t h = heads.first; h < heads.end; h++)
            attend_part(ctx, o, p->row, p->part, h, kept_partial(ctx, l, at, h), scratch);
    atomic_uint *done = &ctx->parts_done[(size_t)row_at * l->n_kv_heads + heads.first];
    if (atomic_fetch_add(done, 1) + 1 < p->n_parts) return 0;
    atomic_store(done, 0);
    for (uint32_t h = heads.first; h < heads.end; h++) {
        const partial first = kept_partial(ctx, l, row_at + parts.first, h);
        const size_t n = (size_t)(l->n_heads / l->n_kv_heads) * l->head_dim;
        const partial sum = {head_out(ctx, o, p->row, h), first.m, first.l};
        memcpy(sum.o, first.o, n * sizeof *sum.o);
        for (uint32_t part = parts.first + 1; part < parts.end; part++)
            add_partial(ctx, l, sum, kept_partial(ctx, l, row_at + part, h));
    }
    return 1;
}

void attend_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread) {
    const cflow_layer *l = model_layer(ctx->weights, (uint32_t)o->layer);
    const uint32_t n = heads_per_unit(l), width = n * (l->n_heads / l->n_kv_heads) * l->head_dim;
    float *scratch = ctx_scratch(ctx, thread);
    for (uint32_t u = first; u < end; u++) {
        const uint32_t at = u % ctx->step.n_row_parts, set = u / ctx->step.n_row_parts;
        const range heads = {set * n, (set + 1) * n};
        const row_part *p = &ctx->row_parts[at];
        if (p->n_parts == 1)
            for (uint32_t h = heads.first; h < heads.end; h++)
                attend_row(ctx, o, p->row, h, scratch);
        else if (!attend_cut(ctx, o, at, heads, scratch))
            continue;
        buffer_finish(ctx, ctx_buffer(ctx, o->out[0]), p->row, set * width, width);
    }
}

size_t attend_scratch(const model_weights *m) {
    size_t most = 0;
    for (uint32_t i = 0; i < m->header.n_layers; i++) {
        const cflow_layer *l = model_layer(m, i);
        const size_t floats =
            2 * partial_floats(l) + ATTEND_SCRATCH(l->n_heads / l->n_kv_heads, l->head_dim);
        if (most < floats) most = floats;
    }
    return most * sizeof(float);
}
