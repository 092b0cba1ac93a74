#include "layers.h"

#include "clock.h"
#include "sample.h"

static void demand(ring *r, layer_use *use) {
    uint8_t missed;
    tier_demand(r->tier, &use->record, 1, &missed);
    use->is_missed = missed;
}

static void demand_next(ring *r) {
    demand(r, &r->uses[r->next]);
    r->next = (r->next + 1) % r->n_uses;
}

static void fail_rows(cflow_ctx *ctx, uint32_t layer, tier_result result) {
    const step *s = &ctx->step;
    for (uint32_t i = 0; i < s->n_rows; i++) {
        ctx->logit_of_row[i] = -1;
        if (s->row_status[i]) continue;
        s->row_status[i] = record_status(result);
        ctx->faults[i] = (row_fault){(int32_t)layer, NO_RECORD, result};
    }
    for (uint32_t i = 0; i < s->n_scores; i++) s->scores[i] = no_score();
}

static tier_result wait_for(cflow_ctx *ctx, uint32_t record) {
    const uint64_t began = clock_ns();
    const tier_result result = ring_pin(ctx->ring, record, &ctx->cancelled);
    ctx->usage[0].stall_ns += clock_ns() - began;
    atomic_fetch_add(&ctx->stage_count, 1);
    return result;
}

static void charge(cflow_ctx *ctx, const layer_use *use) {
    if (!use->is_missed) return;
    ctx->usage[0].layer_reads++;
    ctx->usage[0].disk_bytes += ctx->ring->records[use->record].bytes;
}

/* 1 for the first uses of a step, whose records are demanded before it begins. */
static int is_read_ahead(const ring *r, const layer_use *use) {
    return use < r->uses + r->n_passing;
}

/* Waits for the record and pins it. A record that is read ahead of the step may have failed long
 * before, so a failed one is read once more. */
static tier_result pin_record(cflow_ctx *ctx, layer_use *use) {
    const tier_result result = wait_for(ctx, use->record);
    const int has_failed = result != TIER_OK && result != TIER_CANCELLED;
    if (!has_failed || !is_read_ahead(ctx->ring, use)) return result;
    demand(ctx->ring, use);
    return wait_for(ctx, use->record);
}

/* Returns 0 if the step was cancelled, or the read failed and with it every row. */
static int pin_use(cflow_ctx *ctx, layer_use *use) {
    const tier_result result = pin_record(ctx, use);
    charge(ctx, use);
    use->is_pinned = result == TIER_OK;
    if (result == TIER_CANCELLED)
        ctx->step.cancelled = 1;
    else if (result)
        fail_rows(ctx, use->layer, result);
    return use->is_pinned;
}

int layers_begin(cflow_ctx *ctx, uint32_t phase) {
    ring *r = ctx->ring;
    if (!r || !r->n_uses || phase % 2 || phase / 2 >= ctx->plan->n_stages) return 1;
    if (!r->is_reading)
        for (uint32_t i = 0; i < r->n_passing; i++) demand_next(r);
    r->is_reading = 1;
    for (uint32_t i = 0; i < r->n_uses; i++)
        if (r->uses[i].first == phase / 2 && !pin_use(ctx, &r->uses[i])) return 0;
    return 1;
}

void layers_end(cflow_ctx *ctx, uint32_t phase) {
    ring *r = ctx->ring;
    if (!r || phase % 2) return;
    for (uint32_t i = 0; i < r->n_uses; i++) {
        layer_use *use = &r->uses[i];
        if (!use->is_pinned || use->last != phase / 2) continue;
        use->is_pinned = 0;
        tier_release(r->tier, use->record);
        demand_next(r);
    }
}

void layers_abandon(cflow_ctx *ctx) {
    ring *r = ctx->ring;
    if (!r) return;
    for (uint32_t i = 0; i < r->n_uses; i++) {
        if (r->uses[i].is_pinned) tier_release(r->tier, r->uses[i].record);
        r->uses[i].is_pinned = 0;
    }
    tier_withdraw(r->tier);
    r->next = 0;
    r->is_reading = 0;
}
