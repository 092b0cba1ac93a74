/* Attention: rotary tables, what goes into the KV blocks, and attending to them. */
#include <math.h>
#include <string.h>

#include "ctx.h"

/* ---- rotary position embedding ---- */

/* Llama 3: wavelengths beyond original / low_freq are divided by the factor, those below
 * original / high_freq kept, a linear blend in between. */
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

void rope_table(const cflow_layer *l, uint32_t context, float *table) {
    const uint32_t half = l->rope_dim / 2;
    for (uint32_t i = 0; i < half; i++) {
        const double f = scaled_frequency(l, pow(l->rope_base, -2.0 * i / l->rope_dim));
        for (uint32_t p = 0; p < context; p++) {
            table[(size_t)p * 2 * half + i] = (float)cos(p * f);
            table[(size_t)p * 2 * half + half + i] = (float)sin(p * f);
        }
    }
}

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

static size_t kv_element(int32_t kv_type) {
    return kv_type == CFLOW_KV_F32 ? 4 : kv_type == CFLOW_KV_Q8 ? 1 : 2;
}

size_t kv_head_bytes(const cflow_layer *l, int32_t kv_type) {
    const size_t codes = 2 * CFLOW_KV_BLOCK * (size_t)l->head_dim * kv_element(kv_type);
    const size_t scales = kv_type == CFLOW_KV_Q8 ? 2 * CFLOW_KV_BLOCK * sizeof(float) : 0;
    return round_up(codes + scales, 64);
}

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

/* Stores x (n,) at element `at`, `stride` elements apart; q8 also stores its scale. */
static void kv_store(const cflow_ctx *ctx, uint8_t *codes, float *scale, const float *x, uint32_t n,
                     size_t at, size_t stride) {
    float amax = 0, bad = 0; /* bad: NaN if any x is not finite, and then so is the scale */
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
        if (bad != 0 || !isfinite(to_codes)) to_codes = 0; /* nothing, or too small to divide by */
        *scale = amax / 127.0f + bad;
        for (uint32_t i = 0; i < n; i++)
            ((int8_t *)codes)[at + i * stride] =
                (int8_t)(to_codes == 0 ? 0 : rintf(x[i] * to_codes));
        break;
    }
}

static void kv_append(const cflow_ctx *ctx, const cflow_layer *l, uint8_t *head, uint32_t position,
                      const float *k, const float *v) {
    const size_t half = CFLOW_KV_BLOCK * (size_t)l->head_dim * kv_element(ctx->options.kv_type);
    const uint32_t p = position % CFLOW_KV_BLOCK;
    float *scales = (float *)(void *)(head + 2 * half);
    kv_store(ctx, head, scales + p, k, l->head_dim, p, CFLOW_KV_BLOCK);
    kv_store(ctx, head + half, scales + CFLOW_KV_BLOCK + p, v, l->head_dim, (size_t)p * l->head_dim,
             1);
}

/* ---- OP_KV: one unit is one row and KV head ---- */

static float inverse_rms(const cflow_ctx *ctx, const float *x, uint32_t n, float eps) {
    return 1.0f / sqrtf(ctx->k.sum_squares(x, n) / (float)n + eps);
}

/* Head `head` of a projection x (n_heads * head_dim), normed and rotated, into out (head_dim,). */
static void prepare_head(const cflow_ctx *ctx, const cflow_layer *l, const float *x,
                         uint32_t n_heads, uint32_t head, const matrix *weight, const float *table,
                         float *out) {
    const uint32_t n = l->head_dim;
    const float *from = x + head * n;
    if (l->qk_norm == CFLOW_QK_NORM_HEAD)
        ctx->k.scale_weight(from, inverse_rms(ctx, from, n, l->norm_eps), matrix_vector(weight),
                            l->norm_offset, n, out);
    else if (l->qk_norm == CFLOW_QK_NORM_FULL)
        ctx->k.scale_weight(from, inverse_rms(ctx, x, n_heads * n, l->norm_eps),
                            matrix_vector(weight) + head * n, l->norm_offset, n, out);
    else
        memcpy(out, from, n * sizeof *out);
    rotate(l, table, out);
}

span kv_span(const cflow_ctx *ctx, const op *o) {
    const cflow_layer *l = model_layer(ctx->model, (uint32_t)o->layer);
    return (span){.units = ctx->step.n_rows * l->n_kv_heads,
                  .cost = 8ull * l->head_dim * (l->n_heads / l->n_kv_heads + 2)};
}

static void kv_unit(const cflow_ctx *ctx, const op *o, uint32_t row, uint32_t head,
                    float *scratch) {
    const uint32_t layer = (uint32_t)o->layer;
    const cflow_layer *l = model_layer(ctx->model, layer);
    const cflow_row *r = &ctx->step.rows[row];
    const buffer *q = ctx_buffer(ctx, o->in[0]), *k = ctx_buffer(ctx, o->in[1]);
    const buffer *v = ctx_buffer(ctx, o->in[2]), *q_rot = ctx_buffer(ctx, o->out[0]);
    const uint32_t n = l->head_dim, group = l->n_heads / l->n_kv_heads;
    const float *table =
        ctx->rope[layer] ? ctx->rope[layer] + (size_t)r->position * l->rope_dim : NULL;
    for (uint32_t i = head * group; i < (head + 1) * group; i++)
        prepare_head(ctx, l, q->f + row * q->ld, l->n_heads, i,
                     model_matrix(ctx->model, layer, CFLOW_Q_NORM), table,
                     q_rot->f + row * q_rot->ld + i * n);
    prepare_head(ctx, l, k->f + row * k->ld, l->n_kv_heads, head,
                 model_matrix(ctx->model, layer, CFLOW_K_NORM), table, scratch);
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
    const uint32_t heads = model_layer(ctx->model, (uint32_t)o->layer)->n_kv_heads;
    for (uint32_t u = first; u < end; u++)
        kv_unit(ctx, o, u / heads, u % heads, ctx_scratch(ctx, thread));
}

/* ---- OP_ATTEND: one unit is one row and a few KV heads ---- */

/* The fewest whose output is whole blocks of 32. */
static uint32_t heads_per_unit(const cflow_layer *l) {
    const uint32_t width = l->n_heads / l->n_kv_heads * l->head_dim;
    for (uint32_t n = 1; n < l->n_kv_heads; n++)
        if (n * width % 32 == 0 && l->n_kv_heads % n == 0) return n;
    return l->n_kv_heads;
}

span attend_span(const cflow_ctx *ctx, const op *o) {
    const cflow_layer *l = model_layer(ctx->model, (uint32_t)o->layer);
    const uint32_t heads = heads_per_unit(l);
    const uint64_t positions = ctx->step.attended / ctx->step.n_rows + 1;
    return (span){.units = ctx->step.n_rows * (l->n_kv_heads / heads),
                  .cost = 4 * heads * l->head_dim * positions};
}

static void attend_head(const cflow_ctx *ctx, const op *o, uint32_t row, uint32_t head,
                        uint8_t *scratch) {
    const uint32_t layer = (uint32_t)o->layer;
    const cflow_layer *l = model_layer(ctx->model, layer);
    const cflow_row *r = &ctx->step.rows[row];
    const buffer *q = ctx_buffer(ctx, o->in[0]), *out = ctx_buffer(ctx, o->out[0]);
    const uint32_t group = l->n_heads / l->n_kv_heads, end = (uint32_t)r->position + 1;
    const uint32_t first = l->window && end > l->window ? end - l->window : 0;
    const int32_t *table = ctx->tables + (size_t)r->sequence * (size_t)ctx->max_blocks;
    const uint8_t **blocks = (const uint8_t **)(void *)scratch;
    for (uint32_t b = first / CFLOW_KV_BLOCK; b * CFLOW_KV_BLOCK < end; b++)
        blocks[b] = kv_head(ctx, layer, table[b], head);
    ctx->k.attend(&(attend_args){
        .q = q->f + row * q->ld + head * group * l->head_dim,
        .blocks = blocks,
        .n_heads = group,
        .head_dim = l->head_dim,
        .first = first,
        .end = end,
        .scale = l->attention_scale,
        .kv_type = (cflow_kv_type)ctx->options.kv_type,
        .o = out->f + row * out->ld + head * group * l->head_dim,
        .scratch =
            (float *)(void *)(scratch + round_up((size_t)ctx->max_blocks * sizeof *blocks, 64)),
    });
}

/* Rows of a prompt attend to ever more; taken from both ends in turn any run of them weighs the
 * same. */
static uint32_t fold(uint32_t i, uint32_t n) {
    return i % 2 ? n - 1 - i / 2 : i / 2;
}

void attend_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread) {
    const cflow_layer *l = model_layer(ctx->model, (uint32_t)o->layer);
    const uint32_t heads = heads_per_unit(l), n_rows = ctx->step.n_rows;
    const uint32_t width = heads * (l->n_heads / l->n_kv_heads) * l->head_dim;
    for (uint32_t u = first; u < end; u++) {
        const uint32_t row = fold(u % n_rows, n_rows), head = u / n_rows * heads;
        for (uint32_t i = 0; i < heads; i++)
            attend_head(ctx, o, row, head + i, ctx_scratch(ctx, thread));
        buffer_finish(ctx, ctx_buffer(ctx, o->out[0]), row, u / n_rows * width, width);
    }
}

size_t attend_scratch(const cflow_model *model, int32_t max_blocks) {
    size_t most = 0;
    for (uint32_t i = 0; i < model->header.n_layers; i++) {
        const cflow_layer *l = model_layer(model, i);
        const size_t floats =
            ATTEND_SCRATCH(l->n_heads / l->n_kv_heads, l->head_dim) + 2 * l->head_dim;
        if (most < floats) most = floats;
    }
    return round_up((size_t)max_blocks * sizeof(uint8_t *), 64) + most * sizeof(float);
}
