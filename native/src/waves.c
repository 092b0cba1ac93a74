/* Which experts run in the phase that is about to begin: those whose records are in memory. */
#include "waves.h"

#include "clock.h"
#include "tensors.h"

/* The next op of a kind in a stage after `after`, or the first if that is NULL; NULL at the end. */
static const op *next_op(const cflow_ctx *ctx, uint32_t stage, op_kind kind, const op *after) {
    const plan *p = ctx->plan;
    const op *o = after ? after + 1 : p->ops + p->first_op[stage];
    const op *end = p->ops + p->first_op[stage + 1];
    while (o < end && o->kind != kind) o++;
    return o < end ? o : NULL;
}

/* ---- demands ---- */

/* Demands the records of all experts of a group. scratch: 5 bytes for each. */
static void demand(cflow_ctx *ctx, groups *g, void *scratch) {
    uint32_t *records = scratch;
    uint8_t *missed = (uint8_t *)(records + g->n_active);
    for (uint32_t i = 0; i < g->n_active; i++) records[i] = g->experts[i].record;
    tier_demand(ctx->tier, records, g->n_active, missed);
    for (uint32_t i = 0; i < g->n_active; i++) g->experts[i].is_missed = missed[i];
    g->is_demanded = 1;
}

void waves_selected(cflow_ctx *ctx, const op *select, void *scratch) {
    const uint32_t *demands = ctx->plan->demands + select->first_demand;
    if (!ctx->tier) return;
    for (uint32_t i = 0; i < select->n_demands; i++)
        demand(ctx, ctx_buffer(ctx, demands[i])->groups, scratch);
}

/* The usage that an expert is charged to: that of the first row that chose it. */
static cflow_row_usage *payer(const cflow_ctx *ctx, const groups *g, const active_expert *e) {
    return &ctx->usage[g->rows[e->first]];
}

static void charge(cflow_ctx *ctx, const groups *g) {
    for (uint32_t i = 0; i < g->n_active; i++) {
        const active_expert *e = &g->experts[i];
        cflow_row_usage *usage = payer(ctx, g, e);
        if (e->is_missed) {
            usage->expert_misses++;
            usage->disk_bytes += record_bytes(&ctx->weights->records[e->record]);
        } else {
            usage->expert_hits++;
        }
    }
}

/* ---- experts whose records are there ---- */

/* Adds expert `index` of a group, whose record is at `bytes`, to the next wave. */
static void take(cflow_ctx *ctx, const op *o, groups *g, uint32_t index, const uint8_t *bytes) {
    active_expert *next = &g->experts[g->n_ready++], taken = g->experts[index];
    g->experts[index] = *next;
    taken.bytes = bytes;
    *next = taken;
    uint64_t streamed = 0;
    for (cflow_role role = CFLOW_EXPERT_GATE; role <= CFLOW_EXPERT_DOWN; role++) {
        const matrix *w = model_matrix(ctx->weights, (uint32_t)o->layer, role);
        streamed += w->n_stripes * w->stripe_bytes;
    }
    atomic_fetch_add(&ctx->read_bytes, streamed);
}

/* The bytes of a record, pinned; NULL if it is not in memory. */
static const uint8_t *record_if_there(const cflow_ctx *ctx, uint32_t record) {
    tier *t = ctx->tier;
    return t ? tier_try_acquire(t, record) : ctx->weights->expert_data[record];
}

static void take_all(cflow_ctx *ctx, uint32_t stage) {
    for (const op *o = NULL; (o = next_op(ctx, stage, OP_EXPERT_GATED, o));) {
        groups *g = op_groups(ctx, o);
        for (uint32_t i = g->n_ready; i < g->n_active; i++) {
            const uint8_t *bytes = record_if_there(ctx, g->experts[i].record);
            if (bytes) take(ctx, o, g, i, bytes);
        }
    }
}

/* Unpins the records of the experts up to `end`: they are done. */
static void release(cflow_ctx *ctx, groups *g, uint32_t end) {
    for (; g->n_done < end; g->n_done++)
        if (ctx->tier) tier_release(ctx->tier, g->experts[g->n_done].record);
}

/* ---- faults ---- */

/* Fails a row and the later rows of its sequence, which would attend to its wrong KV. */
static void fail_row(cflow_ctx *ctx, uint32_t row, row_fault fault) {
    const step *s = &ctx->step;
    for (uint32_t i = row; i < s->n_rows; i++) {
        if (s->row_status[i] || s->rows[i].sequence != s->rows[row].sequence) continue;
        s->row_status[i] = record_status(fault.result);
        ctx->faults[i] = fault;
        ctx->logit_of_row[i] = -1;
    }
}

/* Drops expert `index` of a group: its record could not be read. */
static void lose(cflow_ctx *ctx, const op *o, groups *g, uint32_t index, tier_result result) {
    const active_expert e = g->experts[index];
    const uint32_t top_k = model_layer(ctx->weights, (uint32_t)o->layer)->top_k;
    for (uint32_t i = e.first; i < e.first + e.n; i++) {
        const uint32_t row = (uint32_t)g->rows[i], rank = (uint32_t)g->outputs[i] - row * top_k;
        g->weights[row * g->weights_ld + rank] = 0;
        if (!ctx->step.row_status[row]) fail_row(ctx, row, (row_fault){o->layer, e.record, result});
    }
    g->experts[index] = g->experts[--g->n_active];
}

/* ---- waiting ---- */

/* Lists the records that the stage still waits for in ctx->wanted. Returns how many. */
static uint32_t list_wanted(cflow_ctx *ctx, uint32_t stage) {
    uint32_t n = 0;
    for (const op *o = NULL; (o = next_op(ctx, stage, OP_EXPERT_GATED, o));) {
        const groups *g = op_groups(ctx, o);
        for (uint32_t i = g->n_ready; i < g->n_active; i++) ctx->wanted[n++] = g->experts[i].record;
    }
    return n;
}

/* The op that the n-th record of ctx->wanted is for; *index: its expert in the op's group. */
static const op *find_wanted(const cflow_ctx *ctx, uint32_t stage, uint32_t n, uint32_t *index) {
    const op *o = NULL;
    while ((o = next_op(ctx, stage, OP_EXPERT_GATED, o))) {
        const groups *g = op_groups(ctx, o);
        *index = g->n_ready + n;
        if (*index < g->n_active) break;
        n -= g->n_active - g->n_ready;
    }
    return o;
}

int waves_wait(cflow_ctx *ctx, uint32_t phase) {
    const uint32_t stage = phase / 2, n = list_wanted(ctx, stage);
    uint32_t which, index = 0;
    const uint8_t *bytes;
    if (!n) return 0;
    const uint64_t began = clock_ns();
    const tier_result result =
        tier_acquire(ctx->tier, ctx->wanted, n, &ctx->cancelled, &which, &bytes);
    const uint64_t stall_ns = clock_ns() - began;
    atomic_fetch_add(&ctx->stage_count, 1);
    if (result == TIER_CANCELLED) return 1;
    const op *o = find_wanted(ctx, stage, which, &index);
    groups *g = op_groups(ctx, o);
    payer(ctx, g, &g->experts[index])->stall_ns += stall_ns;
    if (result)
        lose(ctx, o, g, index, result);
    else
        take(ctx, o, g, index, bytes);
    take_all(ctx, stage);
    return 1;
}

/* ---- phases ---- */

static int is_waiting(const cflow_ctx *ctx, uint32_t stage) {
    for (const op *o = NULL; (o = next_op(ctx, stage, OP_EXPERT_GATED, o));)
        if (op_groups(ctx, o)->n_ready < op_groups(ctx, o)->n_active) return 1;
    return 0;
}

static uint32_t n_pinned(const cflow_ctx *ctx, uint32_t stage) {
    uint32_t n = 0;
    for (const op *o = NULL; (o = next_op(ctx, stage, OP_EXPERT_GATED, o));)
        n += op_groups(ctx, o)->n_ready - op_groups(ctx, o)->n_done;
    return n;
}

/* The kind of op that gives the groups whose down products run in a phase. Between two stages it is
 * the gated op, as the down op is in the next stage. */
static op_kind down_ops(uint32_t phase) {
    return phase % 2 ? OP_EXPERT_GATED : OP_EXPERT_DOWN;
}

/* The wave whose gate and up products ran last goes on to its down products. */
static void begin_down(cflow_ctx *ctx, uint32_t phase) {
    for (const op *o = NULL; (o = next_op(ctx, phase / 2, down_ops(phase), o));)
        op_groups(ctx, o)->n_gated = op_groups(ctx, o)->n_ready;
}

/* Demands the experts of a stage that are not demanded yet, and charges all to their rows. */
static void demand_stage(cflow_ctx *ctx, uint32_t stage) {
    for (const op *o = NULL; (o = next_op(ctx, stage, OP_EXPERT_GATED, o));) {
        groups *g = op_groups(ctx, o);
        if (!g->is_demanded) demand(ctx, g, ctx->wanted);
        charge(ctx, g);
    }
}

/* Waits until as many experts are pinned as a step may pin, or all of the stage are. */
static void fill_wave(cflow_ctx *ctx, uint32_t phase) {
    while (n_pinned(ctx, phase / 2) < ctx->model->most_pinned && !atomic_load(&ctx->cancelled))
        if (!waves_wait(ctx, phase)) return;
}

int waves_begin(cflow_ctx *ctx, uint32_t phase) {
    const uint32_t stage = phase / 2;
    const int is_between = phase % 2;
    if (stage >= ctx->plan->n_stages) return 1;
    if (is_between && !is_waiting(ctx, stage)) return 0;
    begin_down(ctx, phase);
    if (!is_between && ctx->tier) demand_stage(ctx, stage);
    take_all(ctx, stage);
    if (ctx->plan->is_synchronous) fill_wave(ctx, phase);
    return 1;
}

uint32_t waves_end(cflow_ctx *ctx, uint32_t phase) {
    const uint32_t stage = phase / 2;
    if (stage >= ctx->plan->n_stages) return phase + 1;
    for (const op *o = NULL; (o = next_op(ctx, stage, down_ops(phase), o));)
        release(ctx, op_groups(ctx, o), op_groups(ctx, o)->n_gated);
    return phase % 2 && is_waiting(ctx, stage) ? phase : phase + 1;
}

/* Pins may be held for this stage and, in its own phase, for the stage before. */
void waves_abandon(cflow_ctx *ctx, uint32_t phase) {
    if (!ctx->tier) return;
    const uint32_t n_stages = ctx->plan->n_stages, end = phase / 2 + 1;
    for (uint32_t stage = end < 2 ? 0 : end - 2; stage < end && stage < n_stages; stage++)
        for (const op *o = NULL; (o = next_op(ctx, stage, OP_EXPERT_GATED, o));)
            release(ctx, op_groups(ctx, o), op_groups(ctx, o)->n_ready);
    tier_withdraw(ctx->tier);
}
