/* Opens and closes contexts. All memory that a context will ever use is laid out twice: first to
 * count it, then to take it. */
#include <string.h>

#include "attention.h"
#include "ctx.h"
#include "layers.h"
#include "ops.h"
#include "sample.h"
#include "status.h"

enum { MAX_THREADS = 256, MAX_ROWS = 1 << 16, MAX_SEQUENCES = 1 << 16 };

/* Memory laid out front to back; without an arena it is only counted. */
typedef struct {
    arena *memory;
    size_t bytes;
} layout;

static void *take(layout *l, size_t n, size_t size) {
    l->bytes += arena_size(n * size);
    return l->memory ? arena_take(l->memory, n * size) : NULL;
}

static void lay_kv(cflow_ctx *ctx, layout *l) {
    const model_weights *m = ctx->weights;
    ctx->block_bytes = 0;
    for (uint32_t i = 0; i < m->header.n_layers; i++) {
        const cflow_layer *layer = model_layer(m, i);
        ctx->block_bytes += layer->n_kv_heads * kv_head_bytes(layer, ctx->options.kv_type);
    }
    ctx->kv = take(l, (size_t)ctx->options.n_kv_blocks, ctx->block_bytes);
}

static groups *lay_groups(const cflow_ctx *ctx, layout *l, const slot *s) {
    const size_t chosen = (size_t)ctx->options.max_rows * s->width;
    groups *g = take(l, 1, sizeof *g);
    const groups lists = {.experts = take(l, s->n_experts, sizeof *lists.experts),
                          .rows = take(l, chosen, sizeof *lists.rows),
                          .outputs = take(l, chosen, sizeof *lists.outputs)};
    if (g) *g = lists;
    return g;
}

static buffer lay_buffer(const cflow_ctx *ctx, layout *l, const slot *s) {
    const size_t rows = (size_t)ctx->options.max_rows * s->per_row;
    buffer b = {0};
    if (s->n_experts) {
        b.groups = lay_groups(ctx, l, s);
        return b;
    }
    b.ld = round_up(s->width, 256);
    b.f = take(l, rows * b.ld, sizeof *b.f);
    if (!s->quantized) return b;
    b.q = take(l, rows * b.ld, sizeof *b.q);
    b.scale = take(l, rows * b.ld / 32, sizeof *b.scale);
    b.sum = take(l, rows * b.ld / 16, sizeof *b.sum);
    return b;
}

static void lay_buffers(cflow_ctx *ctx, layout *l) {
    const plan *p = ctx->plan;
    const int keep = ctx->options.keep_values;
    const uint32_t n = keep ? p->n_values : p->n_slots;
    buffer *buffers = take(l, n, sizeof *buffers);
    for (uint32_t i = 0; i < n; i++) {
        const slot s = keep ? slot_for(&p->values[i]) : p->slots[i];
        const buffer b = lay_buffer(ctx, l, &s);
        if (buffers) buffers[i] = b;
    }
    ctx->buffers = buffers;
}

/* Whether two layers can share a table. */
static int same_rope(const model_weights *m, uint32_t context, uint32_t one, uint32_t other) {
    const cflow_layer *a = model_layer(m, one), *b = model_layer(m, other);
    const float *divisors = rope_divisors(m, one, context),
                *others = rope_divisors(m, other, context);
    if (!divisors != !others || a->rope_dim != b->rope_dim) return 0;
    if (divisors && memcmp(divisors, others, a->rope_dim / 2 * sizeof *divisors)) return 0;
    return a->rope_gain == b->rope_gain && a->rope_dim == b->rope_dim &&
           a->rope_base == b->rope_base && a->rope_scaling == b->rope_scaling &&
           a->rope_factor == b->rope_factor && a->rope_low_freq == b->rope_low_freq &&
           a->rope_high_freq == b->rope_high_freq &&
           a->rope_original_context == b->rope_original_context;
}

static void lay_rope(cflow_ctx *ctx, layout *l) {
    const model_weights *m = ctx->weights;
    const float **tables = take(l, m->header.n_layers, sizeof *tables);
    const uint32_t context = (uint32_t)ctx->options.max_context;
    for (uint32_t i = 0; i < m->header.n_layers; i++) {
        const cflow_layer *layer = model_layer(m, i);
        if (layer->rope_kind == CFLOW_ROPE_NONE) continue;
        uint32_t same = 0;
        while (same < i && (model_layer(m, same)->rope_kind == CFLOW_ROPE_NONE ||
                            !same_rope(m, context, i, same)))
            same++;
        float *table = NULL;
        if (same == i) table = take(l, (size_t)context * layer->rope_dim, sizeof(float));
        if (table) rope_table(layer, rope_divisors(m, i, context), context, table);
        if (tables) tables[i] = same == i ? table : tables[same];
    }
    ctx->rope = tables;
}

static size_t max_of(size_t a, size_t b) {
    return a > b ? a : b;
}

/* The scratch of one thread: enough for a unit of any kind. */
static size_t scratch_bytes(const cflow_ctx *ctx) {
    const size_t gated = 2 * GATED_ROWS * STRIPE_UNITS * UNIT * sizeof(float);
    size_t bytes = max_of(gated, attend_scratch(ctx->weights));
    bytes = max_of(bytes, sample_scratch((int32_t)ctx->weights->header.vocab_size) * sizeof(float));
    for (uint32_t i = 0; i < ctx->weights->header.n_layers; i++)
        bytes = max_of(bytes, model_layer(ctx->weights, i)->n_experts * 5 * sizeof(float));
    return round_up(bytes, 4096); /* so that threads share no cache line and no page */
}

/* The most experts that wait for their records in one stage. */
static size_t most_wanted(const cflow_ctx *ctx) {
    const plan *p = ctx->plan;
    size_t most = 0;
    for (uint32_t stage = 0; stage < p->n_stages; stage++) {
        size_t n = 0;
        for (uint32_t i = p->first_op[stage]; i < p->first_op[stage + 1]; i++)
            if (p->ops[i].kind == OP_EXPERT_GATED)
                n += model_layer(ctx->weights, (uint32_t)p->ops[i].layer)->n_experts;
        most = max_of(most, n);
    }
    return most;
}

static void lay_tier(cflow_ctx *ctx, layout *l) {
    const size_t rows = (size_t)ctx->options.max_rows;
    if (!ctx->tier && !ctx->ring) return;
    ctx->faults = take(l, rows, sizeof *ctx->faults);
    ctx->usage = take(l, rows, sizeof *ctx->usage);
    if (ctx->tier) ctx->wanted = take(l, most_wanted(ctx), sizeof *ctx->wanted + 1);
}

static void lay_parts(cflow_ctx *ctx, layout *l) {
    const model_weights *m = ctx->weights;
    const size_t cuts = attend_cuts(m, &ctx->options);
    size_t heads = 0;
    for (uint32_t i = 0; i < m->header.n_layers; i++)
        heads = max_of(heads, model_layer(m, i)->n_kv_heads);
    ctx->row_parts = take(l, max_of(cuts, (size_t)ctx->options.max_rows), sizeof *ctx->row_parts);
    ctx->partials = take(l, cuts, attend_partial_bytes(m));
    ctx->parts_done = take(l, cuts * heads, sizeof *ctx->parts_done);
}

static void lay_rest(cflow_ctx *ctx, layout *l) {
    const cflow_ctx_options *o = &ctx->options;
    const size_t sequences = (size_t)o->max_sequences, rows = (size_t)o->max_rows;
    ctx->max_blocks = (o->max_context + CFLOW_KV_BLOCK - 1) / CFLOW_KV_BLOCK;
    ctx->layer_offset = take(l, ctx->weights->header.n_layers, sizeof *ctx->layer_offset);
    ctx->head_bytes = take(l, ctx->weights->header.n_layers, sizeof *ctx->head_bytes);
    ctx->tables = take(l, sequences * (size_t)ctx->max_blocks, sizeof *ctx->tables);
    ctx->table_size = take(l, sequences, sizeof *ctx->table_size);
    lay_buffers(ctx, l);
    lay_rope(ctx, l);
    ctx->vocab_ld = round_up(ctx->weights->header.vocab_size, 256);
    ctx->logits = take(l, sequences * ctx->vocab_ld, sizeof *ctx->logits);
    ctx->score_logits = take(l, SCORE_ROWS * ctx->vocab_ld, sizeof *ctx->score_logits);
    ctx->logit_of_row = take(l, rows, sizeof *ctx->logit_of_row);
    ctx->step.logit_rows = take(l, rows, sizeof *ctx->step.logit_rows);
    ctx->step.score_rows = take(l, rows, sizeof *ctx->step.score_rows);
    lay_parts(ctx, l);
    lay_tier(ctx, l);
    ctx->shares = take(l, (size_t)o->n_threads, sizeof *ctx->shares);
    ctx->times = take(l, ctx->plan->n_stages + 2, sizeof *ctx->times);
    ctx->scratch_bytes = scratch_bytes(ctx);
    ctx->scratch = take(l, (size_t)o->n_threads, ctx->scratch_bytes);
}

static void fill_kv_offsets(cflow_ctx *ctx) {
    size_t at = 0;
    for (uint32_t i = 0; i < ctx->weights->header.n_layers; i++) {
        const cflow_layer *l = model_layer(ctx->weights, i);
        ctx->head_bytes[i] = kv_head_bytes(l, ctx->options.kv_type);
        ctx->layer_offset[i] = at;
        at += l->n_kv_heads * ctx->head_bytes[i];
    }
}

static cflow_status check_option(int ok, const char *name, int32_t given, const char *want,
                                 cflow_error *err) {
    return ok ? CFLOW_OK : fail(err, CFLOW_EINVAL, "%s is %d; it must be %s", name, given, want);
}

/* The most units that an op can have in a phase. */
static uint64_t most_units(const model_weights *m, const cflow_ctx_options *options, const op *o) {
    const uint64_t rows = (uint64_t)options->max_rows;
    const cflow_role role = o->kind == OP_EXPERT_DOWN ? CFLOW_EXPERT_DOWN : CFLOW_EXPERT_GATE;
    uint64_t units = 0;
    switch (o->kind) {
    case OP_COMBINE:
        return rows;
    case OP_MATMUL:
        for (uint32_t i = 0; i < o->n_pieces; i++) units += matrix_units(o->pieces[i].w);
        return units;
    case OP_GATED:
        return matrix_units(o->gated.up);
    case OP_KV:
        return rows * model_layer(m, (uint32_t)o->layer)->n_kv_heads;
    case OP_ATTEND:
        return max_of(rows, attend_cuts(m, options)) *
               model_layer(m, (uint32_t)o->layer)->n_kv_heads;
    case OP_SELECT:
    case OP_SPECULATE:
        return 1;
    case OP_EXPERT_GATED:
    case OP_EXPERT_DOWN:
        break;
    }
    const cflow_layer *l = model_layer(m, (uint32_t)o->layer);
    const uint64_t chosen = rows * l->top_k;
    return (chosen < l->n_experts ? chosen : l->n_experts) *
           matrix_units(model_matrix(m, (uint32_t)o->layer, role));
}

/* EINVAL if a phase can have more units than UNIT_BITS bits can count. */
static cflow_status check_units(const cflow_model *model, const cflow_ctx_options *options,
                                cflow_error *err) {
    const plan *p = model->plan;
    for (uint32_t phase = 0; phase < 2 * p->n_stages; phase++) {
        uint64_t units = 0;
        uint32_t i, end;
        for (phase_ops(p, phase, &i, &end); i < end; i++)
            if (phase_has(&p->ops[i], phase))
                units += most_units(&model->weights, options, &p->ops[i]);
        if (units >> UNIT_BITS)
            return fail(err, CFLOW_EINVAL,
                        "max_rows is %d; stage %u (%s) then has %llu pieces of work, at most %d "
                        "can be counted",
                        options->max_rows, phase / 2, p->ops[p->first_op[phase / 2]].name,
                        (unsigned long long)units, (1 << UNIT_BITS) - 1);
    }
    return CFLOW_OK;
}

static cflow_status check_options(const cflow_model *m, const cflow_ctx_options *o,
                                  cflow_error *err) {
    const int32_t context = o->max_context, kv = o->kv_type;
    cflow_status s = CFLOW_OK;
    if (!s)
        s = check_option(o->n_threads >= 1 && o->n_threads <= MAX_THREADS, "n_threads",
                         o->n_threads, "1 to 256", err);
    if (!s)
        s = check_option(o->max_rows >= 1 && o->max_rows <= MAX_ROWS, "max_rows", o->max_rows,
                         "1 to 65536", err);
    if (!s)
        s = check_option(o->max_sequences >= 1 && o->max_sequences <= MAX_SEQUENCES,
                         "max_sequences", o->max_sequences, "1 to 65536", err);
    if (!s)
        s = check_option(context >= 1 && context <= 1 << 24, "max_context", context,
                         "1 to 16777216", err);
    if (!s)
        s = check_option(o->n_kv_blocks >= 1 && o->n_kv_blocks <= 1 << 24, "n_kv_blocks",
                         o->n_kv_blocks, "1 to 16777216", err);
    if (!s)
        s = check_option(kv >= CFLOW_KV_F16 && kv <= CFLOW_KV_Q8, "kv_type", kv, "a cflow_kv_type",
                         err);
    if (!s) s = check_units(m, o, err);
    if (!s && m->weights.as_f32)
        s = check_option(kv == CFLOW_KV_F32, "kv_type", kv, "f32 where weights are held as f32",
                         err);
    return s;
}

/* *kv_bytes: of KV blocks; *rest_bytes: of everything else. */
static void lay_all(cflow_ctx *ctx, arena *memory, size_t *kv_bytes, size_t *rest_bytes) {
    layout l = {.memory = memory};
    lay_kv(ctx, &l);
    *kv_bytes = l.bytes;
    lay_rest(ctx, &l);
    *rest_bytes = l.bytes - *kv_bytes;
}

/* A context of the model that has no memory yet. */
static cflow_ctx ctx_of(const cflow_model *model, const cflow_ctx_options *options) {
    return (cflow_ctx){.weights = &model->weights,
                       .plan = model->plan,
                       .tier = model->tier,
                       .ring = model->ring,
                       .options = *options};
}

cflow_status cflow_ctx_memory(uint64_t *kv_bytes, uint64_t *scratch_out, const cflow_model *model,
                              const cflow_ctx_options *options, cflow_error *err) {
    const cflow_status status = check_options(model, options, err);
    if (status != CFLOW_OK) return status;
    cflow_ctx counted = ctx_of(model, options);
    size_t kv, rest;
    lay_all(&counted, NULL, &kv, &rest);
    *kv_bytes = kv;
    *scratch_out = rest;
    return CFLOW_OK;
}

static cflow_status open_ctx(cflow_ctx *ctx, cflow_error *err) {
    if (kernels_select(&ctx->k, ctx->options.isa))
        return fail(err, CFLOW_EINVAL, "this machine has no %s; its best is %s", ctx->options.isa,
                    cflow_best_isa());
    size_t kv, rest;
    lay_all(ctx, NULL, &kv, &rest);
    cflow_status status = arena_open(&ctx->memory, kv + rest, "KV and buffers", err);
    if (status != CFLOW_OK) return status;
    lay_all(ctx, &ctx->memory, &kv, &rest);
    fill_kv_offsets(ctx);
    return pool_open(&ctx->pool, ctx->options.n_threads, err);
}

/* A model has one ring. And two contexts that each wait for records while they hold pins would
 * deadlock: expert_window NONE waits that way. */
static int has_one_context(const cflow_model *m) {
    return m->ring || (m->tier && m->plan->is_synchronous);
}

cflow_status cflow_ctx_open(cflow_ctx **out, cflow_model *model, const cflow_ctx_options *options,
                            cflow_error *err) {
    *out = NULL;
    if (model->weights.header_only)
        return fail(err, CFLOW_EINVAL, "the model was opened without its weights");
    cflow_status status = check_options(model, options, err);
    if (status != CFLOW_OK) return status;
    cflow_ctx *ctx = memory_zeroed(1, sizeof *ctx);
    if (!ctx) return fail(err, CFLOW_ENOMEM, "no memory for a context");
    if (has_one_context(model) && atomic_exchange(&model->is_taken, 1)) {
        memory_free(ctx);
        return fail(err, CFLOW_EINVAL, "a model opened with %s has one context",
                    model->ring ? "weights_memory" : "expert_window NONE");
    }
    model_hold(model);
    *ctx = ctx_of(model, options);
    ctx->model = model;
    status = open_ctx(ctx, err);
    if (status != CFLOW_OK) {
        cflow_ctx_close(ctx);
        return status;
    }
    *out = ctx;
    return CFLOW_OK;
}

void cflow_ctx_close(cflow_ctx *ctx) {
    if (!ctx) return;
    layers_abandon(ctx);
    atomic_store(&ctx->model->is_taken, 0);
    pool_close(ctx->pool);
    arena_close(&ctx->memory);
    cflow_model_close(ctx->model);
    memory_free(ctx);
}
