/* The gain from projections of one input sharing a pass: Q, K and V, and gate with up.
 *
 *     fusion MIB THREADS ROUNDS     MIB: of the larger model's projections
 *
 * Fused, as the engine does it: x is quantised once, the threads share all outputs, one barrier;
 * gate and up meet stripe by stripe and only their product is written. Separate: x is quantised and
 * the threads meet for each matrix; gate and up are written, read again and multiplied in a pass of
 * their own.
 */
#include "arms.h"

enum { UNIT = 32 }; /* outputs: what threads share */

typedef struct {
    const char *name;
    uint32_t d, q, kv, d_ff, layers; /* layers 0: as many as fill MIB; else passes are */
} geometry;

typedef struct {
    uint32_t n_rows, stripe_rows, n_blocks;
    size_t at; /* in a layer's weights */
} projection;

enum { Q, K, V, GATE, UP, N_PROJECTIONS };

typedef struct {
    const kernels *k;
    pool *p;
    uint32_t d, layers, passes;
    projection w[N_PROJECTIONS];
    const uint8_t *weights;
    size_t layer_bytes;
    float *in, *y[N_PROJECTIONS]; /* (d,), (n_rows,) */
    activations x, hidden;
} model;

static void quantize(const model *m, const float *f, activations to, uint32_t first, uint32_t n) {
    m->k->quantize(f + first, n, (int8_t *)to.q + first, (float *)to.scale + first / 32,
                   (int32_t *)to.sum + first / 16);
}

static void multiply(const model *m, const uint8_t *layer, int which, uint32_t first, uint32_t end,
                     float *y) {
    const projection *w = &m->w[which];
    const uint32_t per_stripe = w->stripe_rows / UNIT;
    const size_t bytes = stripe_bytes(CFLOW_Q4_0, w->stripe_rows, m->d);
    for (uint32_t u = first, n; u < end; u += n) {
        n = per_stripe - u % per_stripe;
        if (n > end - u) n = end - u;
        m->k->matmul[CFLOW_Q4_0](&(matmul_args){.stripe = layer + w->at + u / per_stripe * bytes,
                                                .stripe_groups = w->stripe_rows / 16,
                                                .first = u % per_stripe * 2,
                                                .n_groups = n * 2,
                                                .n_blocks = w->n_blocks,
                                                .m = 1,
                                                .x = m->x,
                                                .y = y + (u - first) * UNIT,
                                                .y_ld = w->n_rows});
    }
}

/* The thread's part of n units. */
static uint32_t border(const model *m, uint32_t n, int thread) {
    return (uint32_t)((uint64_t)n * (uint32_t)thread / (uint32_t)pool_threads(m->p));
}

static void quantize_input(const model *m, int thread) {
    if (thread == 0) quantize(m, m->in, m->x, 0, m->d);
    pool_barrier(m->p);
}

static void fused_qkv(const model *m, const uint8_t *layer, int thread) {
    const uint32_t units[] = {m->w[Q].n_rows / UNIT, m->w[K].n_rows / UNIT, m->w[V].n_rows / UNIT};
    const uint32_t all = units[Q] + units[K] + units[V];
    const uint32_t begin = border(m, all, thread), end = border(m, all, thread + 1);
    uint32_t base = 0;
    quantize_input(m, thread);
    for (int i = Q; i <= V; base += units[i++]) {
        const uint32_t first = begin > base ? begin - base : 0;
        const uint32_t last = end < base ? 0 : end - base < units[i] ? end - base : units[i];
        if (first < last) multiply(m, layer, i, first, last, m->y[i] + first * UNIT);
    }
    pool_barrier(m->p);
}

static void fused_gate_up(const model *m, const uint8_t *layer, int thread) {
    const uint32_t units = m->w[GATE].n_rows / UNIT, per_stripe = m->w[GATE].stripe_rows / UNIT;
    const uint32_t end = border(m, units, thread + 1);
    float gate[ROWS], up[ROWS];
    quantize_input(m, thread);
    for (uint32_t u = border(m, units, thread), n; u < end; u += n) {
        n = per_stripe - u % per_stripe;
        if (n > end - u) n = end - u;
        multiply(m, layer, GATE, u, u + n, gate);
        multiply(m, layer, UP, u, u + n, up);
        m->k->gated(gate, up, n * UNIT, CFLOW_SILU, 0, m->y[GATE] + u * UNIT);
        quantize(m, m->y[GATE], m->hidden, u * UNIT, n * UNIT);
    }
    pool_barrier(m->p);
}

static void separate(const model *m, const uint8_t *layer, int which, int thread) {
    const uint32_t units = m->w[which].n_rows / UNIT, first = border(m, units, thread);
    quantize_input(m, thread);
    multiply(m, layer, which, first, border(m, units, thread + 1), m->y[which] + first * UNIT);
    pool_barrier(m->p);
}

static void separate_gated(const model *m, int thread) {
    const uint32_t units = m->w[GATE].n_rows / UNIT, first = border(m, units, thread) * UNIT;
    const uint32_t n = border(m, units, thread + 1) * UNIT - first;
    m->k->gated(m->y[GATE] + first, m->y[UP] + first, n, CFLOW_SILU, 0, m->y[GATE] + first);
    quantize(m, m->y[GATE], m->hidden, first, n);
    pool_barrier(m->p);
}

static void run_fused(void *arg, int thread) {
    const model *m = arg;
    for (uint32_t i = 0; i < m->passes * m->layers; i++) {
        const uint8_t *layer = m->weights + i % m->layers * m->layer_bytes;
        fused_qkv(m, layer, thread);
        fused_gate_up(m, layer, thread);
    }
}

static void run_separate(void *arg, int thread) {
    const model *m = arg;
    for (uint32_t i = 0; i < m->passes * m->layers; i++) {
        const uint8_t *layer = m->weights + i % m->layers * m->layer_bytes;
        for (int which = 0; which < N_PROJECTIONS; which++) separate(m, layer, which, thread);
        separate_gated(m, thread);
    }
}

static uint32_t stripe_rows_of(uint32_t n_rows) {
    uint32_t rows = ROWS;
    while (n_rows % rows != 0) rows -= UNIT;
    return rows;
}

static void compare_geometry(const geometry *g, const kernels *k, const settings *set) {
    const uint32_t n_rows[] = {g->q, g->kv, g->kv, g->d_ff, g->d_ff};
    model m = {.k = k,
               .p = set->p,
               .d = g->d,
               .in = calloc(g->d, sizeof *m.in),
               .x = new_row((g->d + 255) / 256 * 256),
               .hidden = new_row((g->d_ff + 255) / 256 * 256)};
    for (int i = 0; i < N_PROJECTIONS; i++) {
        const uint32_t rows = stripe_rows_of(n_rows[i]);
        m.w[i] = (projection){n_rows[i], rows, g->d / 32, m.layer_bytes};
        m.layer_bytes += n_rows[i] / rows * stripe_bytes(CFLOW_Q4_0, rows, g->d);
        m.y[i] = calloc(n_rows[i], sizeof *m.y[i]);
        if (!m.in || !m.y[i]) FAIL("no memory for %u outputs", n_rows[i]);
    }
    for (uint32_t i = 0; i < g->d; i++) m.in[i] = (float)(i % 7) - 3;
    m.layers = g->layers ? g->layers : (uint32_t)(set->bytes / m.layer_bytes) + 1;
    m.passes = (uint32_t)(set->bytes / (m.layers * m.layer_bytes)) + 1;
    m.weights = new_weights(m.layers * m.layer_bytes);
    const double read = (double)m.passes * m.layers * (double)m.layer_bytes;
    const arm arms[] = {{"fused", run_fused, &m, read}, {"separate", run_separate, &m, read}};
    compare(g->name, arms, 2, set->p, set->rounds);
}

int main(int argc, char **argv) {
    static const geometry geometries[] = {
        {"smollm2-135m", 576, 576, 192, 1536, 30},
        {"d = 2048", 2048, 2048, 2048, 8192, 0},
    };
    kernels k;
    const settings set = read_settings(argc, argv);
    kernels_select(&k, NULL);
    for (size_t i = 0; i < sizeof geometries / sizeof *geometries; i++)
        compare_geometry(&geometries[i], &k, &set);
    return 0;
}
