/* Attention over contexts of several parts: the same bits whether one thread computes a row or
 * several compute its parts, alone or among other rows; and close to a softmax in double precision
 * over the stored keys and values. Positions that are not attended to hold NaN. */
#include "attention.h"
#include "tiny_model.h"

enum {
    PARTS = 4,
    CONTEXT = PARTS * ATTEND_PART,
    LAST = (PARTS - 1) * ATTEND_PART + 100, /* the position of the last row of a chunk */
    SEQUENCES = 3,
    BLOCKS = CONTEXT / CFLOW_KV_BLOCK,
    WIDTH = TINY_HEADS * TINY_HEAD_DIM,
    GROUP = TINY_HEADS / TINY_KV_HEADS,
    BLOCK_CODES = CFLOW_KV_BLOCK * TINY_HEAD_DIM /* of K, or of V */
};

/* ---- keys and values ---- */

static uint32_t hash(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

static uint8_t *head_at(const cflow_ctx *ctx, int32_t sequence, uint32_t layer, uint32_t head,
                        uint32_t position) {
    const int32_t block = ctx->tables[sequence * BLOCKS + (int32_t)(position / CFLOW_KV_BLOCK)];
    return ctx->kv + (size_t)block * ctx->block_bytes + ctx->layer_offset[layer] +
           head * ctx->head_bytes[layer];
}

static size_t code_bytes(const cflow_ctx *ctx) {
    return ctx->options.kv_type == CFLOW_KV_F32 ? 4 : ctx->options.kv_type == CFLOW_KV_Q8 ? 1 : 2;
}

/* The scale of a position's q8 codes of K (v is 0) or V (v is 1). */
static float *scale_of(uint8_t *head, uint32_t v, uint32_t position) {
    return (float *)(void *)(head + 2 * BLOCK_CODES) + v * CFLOW_KV_BLOCK +
           position % CFLOW_KV_BLOCK;
}

static uint8_t *code_of(const cflow_ctx *ctx, uint8_t *head, uint32_t v, uint32_t position,
                        uint32_t d) {
    const uint32_t p = position % CFLOW_KV_BLOCK;
    const uint32_t at = v ? BLOCK_CODES + p * TINY_HEAD_DIM + d : d * CFLOW_KV_BLOCK + p;
    return head + at * code_bytes(ctx);
}

static double kv_value(const cflow_ctx *ctx, uint8_t *head, uint32_t v, uint32_t position,
                       uint32_t d) {
    const uint8_t *code = code_of(ctx, head, v, position, d);
    uint32_t bits = 0;
    float f;
    _Float16 h;
    switch (ctx->options.kv_type) {
    case CFLOW_KV_F32:
        memcpy(&f, code, 4);
        return f;
    case CFLOW_KV_F16:
        memcpy(&h, code, 2);
        return (double)h;
    case CFLOW_KV_BF16:
        memcpy((uint8_t *)&bits + 2, code, 2);
        memcpy(&f, &bits, 4);
        return f;
    default:
        return (double)(int8_t)*code * (double)*scale_of(head, v, position);
    }
}

/* Stores a number between -2 and 2 made of random bits, or NaN. */
static void put(const cflow_ctx *ctx, uint8_t *head, uint32_t v, uint32_t position, uint32_t d,
                uint32_t bits, int is_nan) {
    uint8_t *code = code_of(ctx, head, v, position, d);
    const float f = is_nan ? NAN : (float)(int32_t)bits * 0x1p-31f;
    const uint16_t f16 = is_nan ? 0x7e00 : (uint16_t)((bits & 0x8000) | (0x2c00 + (bits & 0xfff)));
    const uint16_t bf16 = is_nan ? 0x7fc0 : (uint16_t)((bits & 0x8000) | (0x3e00 + (bits & 0xff)));
    switch (ctx->options.kv_type) {
    case CFLOW_KV_F32:
        memcpy(code, &f, 4);
        break;
    case CFLOW_KV_F16:
        memcpy(code, &f16, 2);
        break;
    case CFLOW_KV_BF16:
        memcpy(code, &bf16, 2);
        break;
    default:
        *code = (uint8_t)bits;
        *scale_of(head, v, position) = is_nan ? NAN : 1.0f / 100;
    }
}

/* Fills the KV blocks, always in the same way. Before the window of layer 1 they hold NaN. */
static void fill_kv(const cflow_ctx *ctx) {
    const uint32_t window = model_layer(ctx->weights, 1)->window;
    for (uint32_t i = 0; i < SEQUENCES * CONTEXT * 4u; i++) {
        const int32_t sequence = (int32_t)(i / (4 * CONTEXT));
        const uint32_t layer = i / (2 * CONTEXT) % 2, head = i / CONTEXT % 2, p = i % CONTEXT;
        uint8_t *at = head_at(ctx, sequence, layer, head, p);
        const int is_nan = layer == 1 && sequence == 0 && p + window + TINY_ROWS <= LAST + 1;
        for (uint32_t d = 0; d < TINY_HEAD_DIM; d++)
            for (uint32_t v = 0; v < 2; v++)
                put(ctx, at, v, p, d, hash((i * TINY_HEAD_DIM + d) * 2 + v), is_nan);
    }
}

/* ---- steps ---- */

typedef struct {
    float q[2][WIDTH], attention[2][WIDTH], logits[TINY_VOCAB];
} found;

/* Scores of a few units at most, so that no position takes all the weight; in layer 1 heads differ.
 */
static cflow_model *open_model(uint32_t window) {
    tiny f = tiny_open();
    for (uint32_t layer = 0; layer < 2; layer++) {
        const cflow_tensor *norm = tiny_tensor(&f, CFLOW_NORM1, layer);
        float *weights = (float *)(void *)(f.resident + norm->offset);
        for (uint32_t i = 0; i < TINY_D; i++) weights[i] /= 200;
    }
    float *bias = (float *)(void *)(f.resident + tiny_tensor(&f, CFLOW_Q_BIAS, 1)->offset);
    for (uint32_t i = 0; i < WIDTH; i++) bias[i] = (float)(int32_t)hash(i) * 0x1p-31f;
    f.layers[0].attention_scale = f.layers[1].attention_scale = 1;
    f.layers[1].window = window;
    return tiny_open_model(&f, (cflow_model_options){0}, NULL);
}

static cflow_ctx_options options_of(int n_threads, cflow_kv_type type) {
    return (cflow_ctx_options){.n_threads = n_threads,
                               .max_rows = TINY_ROWS,
                               .max_sequences = TINY_ROWS,
                               .max_context = CONTEXT,
                               .n_kv_blocks = SEQUENCES * BLOCKS,
                               .kv_type = type,
                               .keep_values = 1};
}

/* isa NULL: the best. */
static cflow_ctx *open_ctx(cflow_model *model, int n_threads, cflow_kv_type type, const char *isa) {
    cflow_ctx_options options = options_of(n_threads, type);
    options.isa = isa;
    cflow_ctx *ctx = NULL;
    cflow_error err = {{0}};
    CHECK(cflow_ctx_open(&ctx, model, &options, &err) == CFLOW_OK, "%s", err.text);
    for (int32_t s = 0; s < SEQUENCES; s++) {
        int32_t blocks[BLOCKS];
        for (int32_t i = 0; i < BLOCKS; i++) blocks[i] = (BLOCKS - 1 - i) * SEQUENCES + s;
        CHECK(cflow_ctx_bind(ctx, s, blocks, BLOCKS, &err) == CFLOW_OK, "%s", err.text);
    }
    fill_kv(ctx);
    return ctx;
}

static void step_rows(cflow_ctx *ctx, cflow_row *rows, int32_t n, found *out) {
    int32_t status[TINY_ROWS], got;
    cflow_error err = {{0}};
    for (int32_t i = 0; i < n; i++) {
        rows[i].flags = CFLOW_ROW_LOGITS;
        rows[i].token = rows[i].position % TINY_TOKENS;
    }
    CHECK(cflow_ctx_step(ctx, rows, n, status, NULL, &err) == CFLOW_OK, "%s", err.text);
    for (int32_t i = 0; i < n; i++) {
        const char *const names[2][2] = {{"L0.q_rot", "L1.q_rot"},
                                         {"L0.attention", "L1.attention"}};
        for (int l = 0; l < 2; l++) {
            cflow_ctx_value(ctx, names[0][l], i, out[i].q[l], WIDTH, &got, &err);
            cflow_ctx_value(ctx, names[1][l], i, out[i].attention[l], WIDTH, &got, &err);
        }
        const float *logits = cflow_ctx_logits(ctx, i);
        for (int v = 0; v < TINY_VOCAB; v++) out[i].logits[v] = logits ? logits[v] : NAN;
    }
    CHECK(!*err.text, "%s", err.text);
}

/* Checks that the bits are equal, except that all NaNs are. */
static int same(const found *a, const found *b, size_t n) {
    const float *x = (const float *)a, *y = (const float *)b;
    for (size_t i = 0; i < n * sizeof *a / sizeof *x; i++)
        if (memcmp(&x[i], &y[i], sizeof *x) && !(isnan(x[i]) && isnan(y[i]))) return 0;
    return 1;
}

enum { CHUNK = TINY_ROWS, MIXED = SEQUENCES, N_FOUND = CHUNK + 1 + MIXED };

/* A chunk of a prompt, its last row again alone, and then rows of three lengths; `parts`: into how
 * many parts each of the steps is cut. */
static void run(cflow_ctx *ctx, found *out, uint32_t parts[3]) {
    cflow_row chunk[CHUNK] = {{0}}, alone = {.position = LAST};
    cflow_row mixed[MIXED] = {{.sequence = 2, .position = 3},
                              {.sequence = 0, .position = LAST},
                              {.sequence = 1, .position = ATTEND_PART + 7}};
    for (int32_t i = 0; i < CHUNK; i++) chunk[i].position = LAST + 1 - CHUNK + i;
    step_rows(ctx, chunk, CHUNK, out);
    parts[0] = ctx->step.n_row_parts;
    step_rows(ctx, &alone, 1, out + CHUNK);
    parts[1] = ctx->step.n_row_parts;
    step_rows(ctx, mixed, MIXED, out + CHUNK + 1);
    parts[2] = ctx->step.n_row_parts;
    CHECK(same(out + CHUNK - 1, out + CHUNK, 1), "a row alone is another than in its chunk");
    CHECK(same(out + CHUNK - 1, out + CHUNK + 2, 1), "a row among others is another than alone");
}

/* ---- a plain softmax ---- */

static void check_head(const cflow_ctx *ctx, int32_t sequence, uint32_t position, uint32_t layer,
                       uint32_t h, const found *got) {
    const cflow_layer *l = model_layer(ctx->weights, layer);
    const uint32_t end = position + 1, first = l->window && end > l->window ? end - l->window : 0;
    static double score[CONTEXT];
    double largest = -INFINITY, total = 0, o[TINY_HEAD_DIM] = {0}, spread[TINY_HEAD_DIM] = {0};
    for (uint32_t p = first; p < end; p++) {
        uint8_t *at = head_at(ctx, sequence, layer, h / GROUP, p);
        score[p] = 0;
        for (uint32_t d = 0; d < TINY_HEAD_DIM; d++)
            score[p] += (double)got->q[layer][h * TINY_HEAD_DIM + d] * kv_value(ctx, at, 0, p, d);
        score[p] *= (double)l->attention_scale;
        largest = fmax(largest, score[p]);
    }
    for (uint32_t p = first; p < end; p++) {
        uint8_t *at = head_at(ctx, sequence, layer, h / GROUP, p);
        const double w = exp(score[p] - largest);
        total += w;
        for (uint32_t d = 0; d < TINY_HEAD_DIM; d++) {
            const double add = w * kv_value(ctx, at, 1, p, d);
            o[d] += add;
            spread[d] += fabs(add);
        }
    }
    for (uint32_t d = 0; d < TINY_HEAD_DIM; d++) {
        const double is = (double)got->attention[layer][h * TINY_HEAD_DIM + d];
        CHECK(fabs(is - o[d] / total) < 1e-6 * (1 + spread[d] / total),
              "KV %d, layer %u, head %u: o[%u] is %g, not %g", ctx->options.kv_type, layer, h, d,
              is, o[d] / total);
    }
}

static void check_softmax(const cflow_ctx *ctx, int32_t sequence, uint32_t position,
                          const found *got) {
    for (uint32_t i = 0; i < 2 * TINY_HEADS; i++)
        check_head(ctx, sequence, position, i / TINY_HEADS, i % TINY_HEADS, got);
}

/* ---- */

static void parts_do_not_show(cflow_model *model, cflow_kv_type type) {
    static const int threads[] = {2, 2, 3, 16}; /* the first by the plain loops */
    static found want[N_FOUND], got[N_FOUND];
    uint32_t parts[3];
    cflow_ctx *one = open_ctx(model, 1, type, NULL);
    run(one, want, parts);
    CHECK(parts[0] == CHUNK && parts[1] == 1 && parts[2] == 3, "one thread cuts rows");
    check_softmax(one, 0, LAST, &want[CHUNK]);
    check_softmax(one, 2, 3, &want[CHUNK + 1]);
    check_softmax(one, 1, ATTEND_PART + 7, &want[CHUNK + 3]);
    cflow_ctx_close(one);
    for (int i = 0; i < 4; i++) {
        cflow_ctx *ctx = open_ctx(model, threads[i], type, i ? NULL : "scalar");
        for (int round = 0; round < (i ? 3 : 1); round++) {
            run(ctx, got, parts);
            CHECK(same(want, got, N_FOUND), "KV %d, %d threads: other bits", type, threads[i]);
        }
        CHECK(parts[0] == CHUNK * (threads[i] == 16 ? PARTS : 1), "%u parts of a chunk", parts[0]);
        CHECK(parts[1] == PARTS && parts[2] == 1 + PARTS + 2, "%u and %u parts", parts[1],
              parts[2]);
        cflow_ctx_close(ctx);
    }
}

/* A value that is NaN in one part, in head 0, and an infinite key in another, in head 1. */
static void what_is_no_number_spreads_alike(cflow_model *model, cflow_kv_type type) {
    static found want[N_FOUND], got[N_FOUND];
    const uint32_t at = ATTEND_PART + 40, other = 2 * ATTEND_PART + 5;
    const float infinite = INFINITY;
    uint32_t parts[3];
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        cflow_ctx *ctx = open_ctx(model, n_threads, type, NULL);
        put(ctx, head_at(ctx, 0, 0, 0, at), 1, at, 2, 1, 1);
        if (type == CFLOW_KV_F32)
            memcpy(code_of(ctx, head_at(ctx, 0, 0, 1, other), 0, other, 0), &infinite, 4);
        run(ctx, n_threads == 1 ? want : got, parts);
        CHECK(n_threads == 1 || same(want, got, N_FOUND), "%d threads: other bits", n_threads);
        cflow_ctx_close(ctx);
    }
    for (uint32_t d = 0; d < WIDTH / 2; d++) /* the scale in 8 bits is that of all dimensions */
        CHECK(isnan(want[CHUNK].attention[0][d]) == (type == CFLOW_KV_Q8 || d % TINY_HEAD_DIM == 2),
              "KV %d: o[%u] is %g", type, d, (double)want[CHUNK].attention[0][d]);
}

static void memory_is_bounded(cflow_model *model) {
    cflow_ctx_options options = options_of(2, CFLOW_KV_F16);
    CHECK(attend_cuts(&model->weights, &options) == 16, "%d parts",
          (int)attend_cuts(&model->weights, &options));
    cflow_ctx *ctx = open_ctx(model, 2, CFLOW_KV_F16, NULL);
    cflow_row rows[4] = {{0}};
    found out[4];
    for (int32_t i = 0; i < 4; i++) rows[i].position = LAST - 3 + i;
    step_rows(ctx, rows, 4, out);
    CHECK(ctx->step.n_row_parts == 16, "%u parts", ctx->step.n_row_parts);
    const size_t thread_bytes = ctx->scratch_bytes;
    cflow_ctx_close(ctx);
    options.max_rows = 1;
    CHECK(attend_cuts(&model->weights, &options) == 4, "one row");
    options.max_context = ATTEND_PART;
    CHECK(attend_cuts(&model->weights, &options) == 0, "one part");
    options = options_of(1, CFLOW_KV_F16);
    CHECK(attend_cuts(&model->weights, &options) == 0, "one thread");
    uint64_t kv, one, two;
    cflow_ctx_memory(&kv, &one, model, &options, NULL);
    options.n_threads = 2;
    cflow_ctx_memory(&kv, &two, model, &options, NULL);
    CHECK(two - one >= thread_bytes + 16 * attend_partial_bytes(&model->weights),
          "parts are not counted");
}

int main(void) {
    static const uint32_t windows[] = {ATTEND_PART + 500, 40, ATTEND_PART};
    for (int w = 0; w < 3; w++) {
        cflow_model *model = open_model(windows[w]);
        if (!model) return 1;
        for (cflow_kv_type type = CFLOW_KV_F16; type <= CFLOW_KV_Q8; type++) {
            if (w == 0 || type == CFLOW_KV_BF16) parts_do_not_show(model, type);
            if (w == 0) what_is_no_number_spreads_alike(model, type);
        }
        if (w == 0) memory_is_bounded(model);
        cflow_model_close(model);
    }
    printf(failed ? "parts: failed\n" : "parts: ok\n");
    return failed;
}
