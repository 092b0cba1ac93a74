/* Attention: scalar against a softmax in double precision, the other instruction sets against
 * scalar bit for bit. Positions outside [first, end) hold NaN, blocks before `first` are missing,
 * and buffers have exact size, so that any use of them shows. */
#include "kernel_inputs.h"

typedef struct {
    attend_args args;
    uint32_t n_blocks;
    float *q, *o, *m, *l, *scratch;
    double *k, *v; /* (positions, head_dim), as stored */
    uint8_t **blocks;
} problem;

static size_t value_bytes(cflow_kv_type type) {
    return type == CFLOW_KV_F32 ? 4 : type == CFLOW_KV_Q8 ? 1 : 2;
}

/* Stores x, rounded to the type, at an index of base. Returns the stored value. */
static double put(cflow_kv_type type, uint8_t *base, size_t index, float x) {
    const _Float16 half = (_Float16)x;
    uint32_t bits;
    switch (type) {
    case CFLOW_KV_F32:
        memcpy(base + 4 * index, &x, 4);
        return x;
    case CFLOW_KV_F16:
        memcpy(base + 2 * index, &half, 2);
        return (double)half;
    case CFLOW_KV_BF16:
        memcpy(&bits, &x, 4);
        bits &= 0xffff0000;
        memcpy(base + 2 * index, (uint8_t *)&bits + 2, 2);
        memcpy(&x, &bits, 4);
        return x;
    default:
        base[index] = (uint8_t)(int8_t)lrintf(isnan(x) ? 100 : x * 30);
        return (int8_t)base[index];
    }
}

static void fill_block(problem *p, uint32_t b, uint64_t *state) {
    const attend_args *a = &p->args;
    const size_t codes = 64 * (size_t)a->head_dim, width = value_bytes(a->kv_type);
    const int q8 = a->kv_type == CFLOW_KV_Q8;
    uint8_t *block = exact(codes * width + (q8 ? 256 : 0));
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t position = b * 32 + i;
        const int used = position >= a->first && position < a->end;
        float scales[2] = {used ? random_float(state) / 20 : NAN, used ? random_float(state) : NAN};
        if (q8) memcpy(block + codes + 4 * i, &scales[0], 4);
        if (q8) memcpy(block + codes + 128 + 4 * i, &scales[1], 4);
        for (size_t d = 0; d < a->head_dim; d++) {
            const size_t at = position * (size_t)a->head_dim + d;
            const float k = used ? random_float(state) * 3 : NAN;
            const float v = used ? random_float(state) : NAN;
            p->k[at] = put(a->kv_type, block, d * 32 + i, k) * (q8 ? scales[0] : 1);
            p->v[at] = put(a->kv_type, block + codes / 2 * width, i * a->head_dim + d, v) *
                       (q8 ? scales[1] : 1);
        }
    }
    p->blocks[b] = block;
}

static problem make_problem(cflow_kv_type type, uint32_t n_heads, uint32_t head_dim, uint32_t first,
                            uint32_t end, uint64_t *state) {
    const size_t n_q = (size_t)n_heads * head_dim;
    problem p = {.n_blocks = (end + 31) / 32};
    p.q = exact(n_q * sizeof(float));
    p.o = exact(n_q * sizeof(float));
    p.m = exact(n_heads * sizeof(float));
    p.l = exact(n_heads * sizeof(float));
    p.scratch = exact(ATTEND_SCRATCH(n_heads, head_dim) * sizeof(float));
    p.k = exact(p.n_blocks * 32 * (size_t)head_dim * sizeof(double));
    p.v = exact(p.n_blocks * 32 * (size_t)head_dim * sizeof(double));
    p.blocks = calloc(p.n_blocks, sizeof *p.blocks);
    for (size_t i = 0; i < n_q; i++) p.q[i] = random_float(state);
    p.args = (attend_args){.q = p.q,
                           .blocks = (const uint8_t *const *)p.blocks,
                           .n_heads = n_heads,
                           .head_dim = head_dim,
                           .first = first,
                           .end = end,
                           .scale = 1 / sqrtf((float)head_dim),
                           .cap = below(state, 4) ? 0 : 2,
                           .kv_type = type,
                           .o = p.o,
                           .m = p.m,
                           .l = p.l,
                           .scratch = p.scratch};
    for (uint32_t b = first / 32; b < p.n_blocks; b++) fill_block(&p, b, state);
    return p;
}

static void free_problem(problem *p) {
    for (uint32_t b = 0; b < p->n_blocks; b++) free(p->blocks[b]);
    free(p->blocks), free(p->q), free(p->o), free(p->m), free(p->l), free(p->scratch), free(p->k),
        free(p->v);
}

static double score(const problem *p, uint32_t h, uint32_t position) {
    const attend_args *a = &p->args;
    double sum = 0;
    for (size_t d = 0; d < a->head_dim; d++) {
        sum += (double)p->q[h * a->head_dim + d] * p->k[position * (size_t)a->head_dim + d];
    }
    sum *= a->scale;
    return a->cap > 0 ? a->cap * tanh(sum / a->cap) : sum;
}

static void check_against_softmax(const problem *p) {
    const attend_args *a = &p->args;
    for (uint32_t h = 0; h < a->n_heads; h++) {
        double largest = -INFINITY, total = 0, o[128] = {0};
        for (uint32_t i = a->first; i < a->end; i++) largest = fmax(largest, score(p, h, i));
        for (uint32_t i = a->first; i < a->end; i++) {
            const double w = exp(score(p, h, i) - largest);
            total += w;
            for (size_t d = 0; d < a->head_dim; d++) o[d] += w * p->v[i * (size_t)a->head_dim + d];
        }
        CHECK(fabs(p->m[h] - largest) < 1e-4, "m is %f, not %f", (double)p->m[h], largest);
        CHECK(fabs(p->l[h] / total - 1) < 1e-4, "l is %f, not %f", (double)p->l[h], total);
        for (size_t d = 0; d < a->head_dim; d++) {
            const double got = p->o[h * a->head_dim + d];
            CHECK(fabs(got - o[d] / total) < 1e-4, "type %d head %u o[%zu] is %f, not %f",
                  a->kv_type, h, d, got, o[d] / total);
        }
    }
}

static void test_attend(uint32_t round, const kernels *tables, int n_tables) {
    static const uint32_t head_dims[] = {1, 5, 8, 16, 64, 80, 128};
    uint64_t state = round;
    const uint32_t head_dim = head_dims[below(&state, 7)], n_heads = 1 + below(&state, 9);
    const uint32_t end = 1 + below(&state, 150), first = below(&state, 3) ? 0 : below(&state, end);
    const cflow_kv_type type = (cflow_kv_type)(round % 4);
    const size_t n = (size_t)n_heads * head_dim;
    problem p = make_problem(type, n_heads, head_dim, first, end, &state);
    if (round % 16 > 12) p.q[below(&state, (uint32_t)n)] = round % 16 == 13 ? NAN : INFINITY;
    tables[0].attend(&p.args);
    if (round % 16 <= 12) check_against_softmax(&p);
    float *want = exact((n + 2 * n_heads) * sizeof *want);
    memcpy(want, p.o, n * sizeof *want);
    memcpy(want + n, p.m, n_heads * sizeof *want);
    memcpy(want + n + n_heads, p.l, n_heads * sizeof *want);
    for (int i = 1; i < n_tables; i++) {
        memset(p.o, 0xff, n * sizeof *p.o);
        tables[i].attend(&p.args);
        check_same(want, p.o, n, "attend", tables[i].isa);
        check_same(want + n, p.m, n_heads, "largest score", tables[i].isa);
        check_same(want + n + n_heads, p.l, n_heads, "sum", tables[i].isa);
    }
    free(want);
    free_problem(&p);
}

int main(void) {
    kernels tables[N_ISAS];
    int n_tables = 0;
    for (int i = 0; i < N_ISAS; i++)
        n_tables += kernels_select(&tables[n_tables], all_isas[i]) == 0;
    for (uint32_t round = 1; round <= 400; round++) test_attend(round, tables, n_tables);
    printf("attend: ok on %d instruction sets\n", n_tables);
    return 0;
}
