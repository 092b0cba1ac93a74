/* A step: runs the phases of plan.h, then those of the head. The threads share the units of each
 * phase in proportion to their cost. */
#include "attention.h"
#include "clock.h"
#include "head.h"
#include "layers.h"
#include "moe.h"
#include "ops.h"
#include "status.h"
#include "waves.h"

/* ---- the spans of a phase ---- */

static uint32_t n_spans(const cflow_ctx *ctx, const op *o) {
    if (o->kind == OP_MATMUL) return o->n_pieces;
    if (o->kind == OP_EXPERT_GATED || o->kind == OP_EXPERT_DOWN) return expert_spans(ctx, o);
    return 1;
}

static span span_of(const cflow_ctx *ctx, const op *o, uint32_t index) {
    const uint32_t m = ctx->step.n_rows;
    switch (o->kind) {
    case OP_COMBINE:
        return (span){.units = m, .cost = 8ull * ctx->weights->header.d_model * (o->n_terms + 1)};
    case OP_MATMUL:
        return matrix_span(o->pieces[index].w, m * matrix_unit_bytes(o->pieces[index].w));
    case OP_GATED:
        return gated_span(&o->gated, m);
    case OP_KV:
        return kv_span(ctx, o);
    case OP_ATTEND:
        return attend_span(ctx, o);
    case OP_SELECT:
    case OP_SPECULATE:
        return (span){.units = 1, .cost = 1};
    case OP_EXPERT_GATED:
    case OP_EXPERT_DOWN:
        break;
    }
    return expert_span(ctx, o, index);
}

static void run_span(cflow_ctx *ctx, const op *o, uint32_t index, uint32_t first, uint32_t end,
                     int thread) {
    switch (o->kind) {
    case OP_COMBINE:
        for (uint32_t row = first; row < end; row++) combine_row(ctx, o, row);
        break;
    case OP_MATMUL:
        matmul_run(ctx, o, &o->pieces[index], first, end);
        break;
    case OP_GATED:
        gated_run(ctx, o, first, end, thread);
        break;
    case OP_KV:
        kv_run(ctx, o, first, end, thread);
        break;
    case OP_ATTEND:
        attend_run(ctx, o, first, end, thread);
        break;
    case OP_SELECT:
        select_run(ctx, o, thread);
        break;
    case OP_SPECULATE:
        speculate_run(ctx, o, thread);
        break;
    case OP_EXPERT_GATED:
    case OP_EXPERT_DOWN:
        expert_run(ctx, o, index, first, end, thread);
        break;
    }
}

/* Gets a span: the index-th of op o, or of the head (o is NULL). Returns 0 to see no more. */
typedef int (*span_visitor)(cflow_ctx *ctx, const op *o, uint32_t index, span s, void *arg);

/* Calls visit for the spans of a phase in order. */
static void visit_spans(cflow_ctx *ctx, uint32_t phase, span_visitor visit, void *arg) {
    const plan *p = ctx->plan;
    const uint32_t head = 2 * p->n_stages;
    if (phase >= head) {
        visit(ctx, NULL, phase - head, head_span(ctx, phase - head), arg);
        return;
    }
    uint32_t i, end;
    for (phase_ops(p, phase, &i, &end); i < end; i++) {
        const op *o = &p->ops[i];
        if (!phase_has(o, phase)) continue;
        for (uint32_t j = 0, n = n_spans(ctx, o); j < n; j++)
            if (!visit(ctx, o, j, span_of(ctx, o, j), arg)) return;
    }
}

/* ---- sharing units among threads ---- */

/* Each thread gets a run of units of equal cost; a thread that has finished steals from the others,
 * so one that the scheduler has suspended delays the step only by the units it holds. Threads take
 * whole stripes: parts of a stripe stream more slowly, and each would rearrange the rows of x. */

enum { TURN_BITS = 64 - 2 * UNIT_BITS };

/* A share: units [next, end) that nobody has taken, valid in one turn of the pool. */
static uint64_t pack(unsigned turn, uint32_t next, uint32_t end) {
    return (uint64_t)(turn & ((1u << TURN_BITS) - 1)) << 2 * UNIT_BITS |
           (uint64_t)next << UNIT_BITS | end;
}

typedef struct {
    uint64_t cost;
    uint32_t units;
    uint32_t stripe; /* units in each stripe; 0: stripes differ */
} totals;

static int add_span(cflow_ctx *ctx, const op *o, uint32_t index, span s, void *arg) {
    (void)ctx, (void)o, (void)index;
    totals *t = arg;
    t->stripe = t->units && t->stripe != s.stripe ? 0 : s.stripe;
    t->cost += s.units * s.cost;
    t->units += s.units;
    return 1;
}

typedef struct {
    totals all, so_far;
    unsigned turn;
    int thread;     /* whose share is open */
    uint32_t begun; /* its first unit */
} division;

/* Closes the shares whose borders, in cost, lie in this span. */
static int divide_span(cflow_ctx *ctx, const op *o, uint32_t index, span s, void *arg) {
    division *d = arg;
    const uint64_t n = (uint64_t)ctx->options.n_threads;
    for (; d->thread < ctx->options.n_threads; d->thread++) {
        const uint64_t border = d->all.cost * ((uint64_t)d->thread + 1) / n;
        if (border > d->so_far.cost + s.units * s.cost) break;
        const uint32_t end =
            d->so_far.units + (uint32_t)((border - d->so_far.cost + s.cost - 1) / s.cost);
        atomic_store_explicit(&ctx->shares[d->thread].left, pack(d->turn, d->begun, end),
                              memory_order_release);
        d->begun = end;
    }
    return add_span(ctx, o, index, s, &d->so_far);
}

/* The work of a phase. Where there is none, waits for experts to arrive. */
static totals find_work(cflow_ctx *ctx, uint32_t phase) {
    totals all;
    do {
        all = (totals){0};
        visit_spans(ctx, phase, add_span, &all);
    } while (!all.units && !atomic_load(&ctx->cancelled) && waves_wait(ctx, phase));
    return all;
}

static stage_time *time_of(const cflow_ctx *ctx, uint32_t phase) {
    const uint32_t n = ctx->plan->n_stages;
    return &ctx->times[phase < 2 * n ? phase / 2 : n + phase % 2];
}

/* The first phase from `phase` on that has work; n_phases, with no work, if the step ends first. */
static uint32_t find_phase(cflow_ctx *ctx, uint32_t phase, totals *work) {
    step *s = &ctx->step;
    *work = (totals){0};
    for (; phase < s->n_phases; phase++) {
        s->cancelled = atomic_load(&ctx->cancelled);
        if (s->cancelled || !layers_begin(ctx, phase)) {
            waves_abandon(ctx, phase);
            layers_abandon(ctx);
            return s->n_phases;
        }
        if (waves_begin(ctx, phase)) *work = find_work(ctx, phase);
        if (work->units) break;
    }
    return phase;
}

/* Makes a phase the running one, and divides its work among the threads. */
static void share_phase(cflow_ctx *ctx, uint32_t phase, totals work) {
    step *s = &ctx->step;
    s->n_units = work.units;
    atomic_store(&s->grain, work.stripe ? work.stripe : 1);
    atomic_store(&s->units_done, 0);
    atomic_store(&s->phase, phase);
    if (phase == s->n_phases) return;
    division d = {.all = work, .turn = pool_turn(ctx->pool) + 1};
    visit_spans(ctx, phase, divide_span, &d);
    atomic_fetch_add(&ctx->stage_count, 1);
}

/* Adds the time since the last call to phase `before`. is_over: no phase follows. */
static void count_time(cflow_ctx *ctx, uint32_t before, int is_over) {
    step *s = &ctx->step;
    const uint64_t now = clock_ns();
    if (s->began_ns) atomic_fetch_add(&time_of(ctx, before)->ns, now - s->began_ns);
    s->began_ns = is_over ? 0 : now;
}

/* Begins the first phase from `phase` on that has work, or ends the step. */
static void begin_phase(cflow_ctx *ctx, uint32_t phase) {
    const uint32_t before = atomic_load(&ctx->step.phase);
    totals work;
    phase = find_phase(ctx, phase, &work);
    share_phase(ctx, phase, work);
    count_time(ctx, before, phase == ctx->step.n_phases);
    pool_pass(ctx->pool);
}

typedef struct {
    uint32_t first, end; /* units of the phase */
} run;

/* Takes half of a share, rounded up to whole stripes: the owner from the front, others from the
 * back. grain: units in a stripe. */
static int take_units(share *from, unsigned turn, int own, uint32_t grain, run *out) {
    uint64_t left = atomic_load(&from->left);
    for (;;) {
        const uint32_t next = left >> UNIT_BITS & ((1u << UNIT_BITS) - 1),
                       end = left & ((1u << UNIT_BITS) - 1);
        if (pack(turn, next, end) != left || next >= end) return 0;
        const uint32_t n = (end - next + 1) / 2;
        uint32_t border = own ? (next + n + grain - 1) / grain * grain : (end - n) / grain * grain;
        if (border > end) border = end;
        if (border < next) border = next;
        *out = own ? (run){next, border} : (run){border, end};
        const uint64_t rest = own ? pack(turn, border, end) : pack(turn, next, border);
        if (atomic_compare_exchange_weak(&from->left, &left, rest)) return 1;
    }
}

static int find_units(cflow_ctx *ctx, unsigned turn, int thread, run *out) {
    const int n = ctx->options.n_threads;
    const uint32_t grain = atomic_load(&ctx->step.grain);
    for (int i = 0; i < n; i++)
        if (take_units(&ctx->shares[(thread + i) % n], turn, i == 0, grain, out)) return 1;
    return 0;
}

typedef struct {
    run units;
    uint32_t at; /* first unit of the span that is visited */
    int thread;
} errand;

static int run_span_part(cflow_ctx *ctx, const op *o, uint32_t index, span s, void *arg) {
    errand *e = arg;
    const uint32_t lo = e->units.first > e->at ? e->units.first - e->at : 0;
    const uint32_t hi = e->units.end - e->at < s.units ? e->units.end - e->at : s.units;
    if (lo < hi) {
        if (o)
            run_span(ctx, o, index, lo, hi, e->thread);
        else
            head_run(ctx, index, lo, hi);
    }
    e->at += s.units;
    return e->at < e->units.end;
}

static void run_step(void *arg, int thread) {
    cflow_ctx *ctx = arg;
    step *s = &ctx->step;
    for (;;) {
        /* Reads the turn before the phase: the phase is then that turn's, or the turn is over and
         * no share is valid in it. */
        const unsigned turn = pool_turn(ctx->pool);
        const uint32_t phase = atomic_load(&s->phase);
        if (phase >= s->n_phases) return;
        errand e = {.thread = thread};
        if (!find_units(ctx, turn, thread, &e.units)) {
            const uint64_t from_ns = clock_ns();
            pool_wait(ctx->pool, turn);
            atomic_fetch_add(&time_of(ctx, phase)->idle_ns, clock_ns() - from_ns);
            continue;
        }
        /* Reads the total while these units keep the phase open; later it may be the next one's. */
        const uint32_t n = e.units.end - e.units.first, total = s->n_units;
        visit_spans(ctx, phase, run_span_part, &e);
        if (atomic_fetch_add(&s->units_done, n) + n == total) {
            layers_end(ctx, phase);
            begin_phase(ctx, waves_end(ctx, phase));
        }
    }
}

/* ---- the step ---- */

static cflow_status check_row(const cflow_ctx *ctx, const cflow_row *r, int32_t i,
                              cflow_error *err) {
    const cflow_header *h = &ctx->weights->header;
    if (r->sequence < 0 || r->sequence >= ctx->options.max_sequences)
        return fail(err, CFLOW_EINVAL, "row %d: sequence %d of %d", i, r->sequence,
                    ctx->options.max_sequences);
    if (r->token < 0 || (uint32_t)r->token >= h->vocab_size)
        return fail(err, CFLOW_EINVAL, "row %d: token %d of a vocabulary of %u", i, r->token,
                    h->vocab_size);
    if (r->position < 0 || r->position >= ctx->options.max_context ||
        r->position / CFLOW_KV_BLOCK >= ctx->table_size[r->sequence])
        return fail(err, CFLOW_EINVAL,
                    "row %d: position %d lies outside the %d blocks of sequence %d", i, r->position,
                    ctx->table_size[r->sequence], r->sequence);
    if ((r->flags & CFLOW_ROW_SCORE) && (r->target < 0 || (uint32_t)r->target >= h->vocab_size ||
                                         r->n_top < 0 || r->n_top > CFLOW_MAX_TOP))
        return fail(err, CFLOW_EINVAL, "row %d: target %d or n_top %d out of range", i, r->target,
                    r->n_top);
    if (r->n_experts < 0) return fail(err, CFLOW_EINVAL, "row %d: %d experts", i, r->n_experts);
    return CFLOW_OK;
}

static cflow_status begin_row(cflow_ctx *ctx, int32_t i, cflow_error *err) {
    step *s = &ctx->step;
    const cflow_row *row = &s->rows[i];
    const cflow_status status = check_row(ctx, row, i, err);
    if (status != CFLOW_OK) return status;
    s->row_status[i] = CFLOW_OK;
    if (ctx->usage) ctx->usage[i] = (cflow_row_usage){0};
    if (ctx->faults) ctx->faults[i] = (row_fault){0};
    s->attended += (uint64_t)row->position + 1;
    ctx->logit_of_row[i] = -1;
    if (row->flags & CFLOW_ROW_SCORE) s->score_rows[s->n_scores++] = i;
    if (!(row->flags & CFLOW_ROW_LOGITS)) return CFLOW_OK;
    if (s->n_logits == (uint32_t)ctx->options.max_sequences)
        return fail(err, CFLOW_EINVAL, "more than %d rows keep their logits",
                    ctx->options.max_sequences);
    ctx->logit_of_row[i] = (int32_t)s->n_logits;
    s->logit_rows[s->n_logits++] = i;
    return CFLOW_OK;
}

static cflow_status begin_step(cflow_ctx *ctx, const cflow_row *rows, int32_t n_rows,
                               int32_t *row_status, cflow_score *scores, cflow_error *err) {
    step *s = &ctx->step;
    if (n_rows < 1 || n_rows > ctx->options.max_rows)
        return fail(err, CFLOW_EINVAL, "%d rows; a step takes 1 to %d", n_rows,
                    ctx->options.max_rows);
    s->rows = rows;
    s->n_rows = (uint32_t)n_rows;
    s->row_status = row_status;
    s->scores = scores;
    s->n_logits = s->n_scores = 0;
    s->attended = 0;
    s->cancelled = 0;
    for (int32_t i = 0; i < n_rows; i++) {
        const cflow_status status = begin_row(ctx, i, err);
        if (status != CFLOW_OK) return status;
    }
    if (s->n_scores && !scores) return fail(err, CFLOW_EINVAL, "SCORE rows but nowhere for scores");
    attend_divide(ctx);
    return CFLOW_OK;
}

/* Adds the weight bytes that the step streamed, but for experts: waves.c counts those. */
static void count_bytes(cflow_ctx *ctx) {
    const plan *p = ctx->plan;
    const matrix *head = head_matrix(ctx->weights);
    const uint64_t head_bytes = (uint64_t)head->n_stripes * head->stripe_bytes;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < p->n_ops; i++)
        if (p->ops[i].kind == OP_MATMUL || p->ops[i].kind == OP_GATED) bytes += p->ops[i].bytes;
    bytes += head_bytes *
             ((ctx->step.n_logits != 0) + (ctx->step.n_scores + SCORE_ROWS - 1) / SCORE_ROWS);
    atomic_fetch_add(&ctx->read_bytes, bytes);
}

cflow_status cflow_ctx_step(cflow_ctx *ctx, const cflow_row *rows, int32_t n_rows,
                            int32_t *row_status, cflow_score *scores, cflow_error *err) {
    ctx->step.n_rows = 0;
    const cflow_status status = begin_step(ctx, rows, n_rows, row_status, scores, err);
    if (status != CFLOW_OK) {
        ctx->step.n_rows = 0;
        return status;
    }
    atomic_store(&ctx->cancelled, 0);
    ctx->step.n_phases = 2 * ctx->plan->n_stages + head_phases(ctx);
    begin_phase(ctx, 0);
    pool_run(ctx->pool, run_step, ctx);
    if (ctx->step.cancelled) {
        ctx->step.n_rows = 0;
        return fail(err, CFLOW_ECANCELLED, "the step was cancelled");
    }
    count_bytes(ctx);
    return CFLOW_OK;
}

void cflow_ctx_cancel(cflow_ctx *ctx) {
    atomic_store(&ctx->cancelled, 1);
    if (ctx->tier) tier_interrupt(ctx->tier);
    if (ctx->ring) tier_interrupt(ctx->ring->tier);
}
