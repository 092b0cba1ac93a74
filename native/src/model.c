/* Reads an open model (headers, plan, counters of its caches, rows of its tensors), closes it. */
#include "model.h"

#include <string.h>

#include "kernels.h"
#include "status.h"
#include "tensors.h"

void model_hold(cflow_model *m) {
    atomic_fetch_add(&m->n_holders, 1);
}

static void close_weights(model_weights *w) {
    for (uint32_t i = 0; i < CFLOW_N_SECTIONS; i++) memory_free(w->sections[i]);
    memory_free(w->blocks);
    memory_free(w->expert_data);
    memory_free(w->first_record);
    arena_close(&w->memory);
}

void cflow_model_close(cflow_model *m) {
    if (!m || atomic_fetch_sub(&m->n_holders, 1) > 1) return;
    tier_close(m->tier);
    ring_close(m->ring);
    plan_close(m->plan);
    close_weights(&m->weights);
    memory_free(m);
}

const cflow_header *cflow_model_header(const cflow_model *model) {
    return &model->weights.header;
}

const cflow_layer *cflow_model_layer(const cflow_model *model, uint32_t layer) {
    const model_weights *m = &model->weights;
    return layer < m->header.n_layers ? model_layer(m, layer) : NULL;
}

const cflow_tensor *cflow_model_tensor(const cflow_model *model, uint32_t index) {
    const model_weights *m = &model->weights;
    return index < m->header.n_tensors ? &m->tensors[index] : NULL;
}

const void *cflow_model_section(const cflow_model *model, uint32_t section, uint64_t *bytes) {
    const model_weights *m = &model->weights;
    const int known = section < CFLOW_N_SECTIONS && m->sections[section];
    *bytes = known ? m->header.sections[section].bytes : 0;
    return known ? m->sections[section] : NULL;
}

void cflow_model_memory(const cflow_model *model, cflow_memory *out) {
    *out = model->memory;
    if (model->tier) tier_add_memory(model->tier, out);
    if (model->ring && model->ring->tier) tier_add_memory(model->ring->tier, out);
}

void cflow_model_plan(const cflow_model *model, cflow_plan_info *out) {
    *out = model->plan->info;
}

cflow_status cflow_model_op(const cflow_model *model, uint32_t index, cflow_op_info *out,
                            cflow_error *err) {
    return plan_describe(model->plan, index, out, err);
}

void cflow_model_tier(const cflow_model *model, cflow_tier_stats *out) {
    *out = (cflow_tier_stats){0};
    if (model->tier) tier_get_stats(model->tier, out);
}

void cflow_model_layer_tier(const cflow_model *model, cflow_tier_stats *out) {
    *out = (cflow_tier_stats){0};
    if (model->ring && model->ring->tier) tier_get_stats(model->ring->tier, out);
}

void cflow_model_layer_records(const cflow_model *model, cflow_layer_records *out) {
    *out = (cflow_layer_records){0};
    const ring *r = model->ring;
    if (!r) return;
    *out = (cflow_layer_records){.n_records = r->n_records,
                                 .n_slots = r->n_slots,
                                 .n_least = r->n_passing,
                                 .n_kept = r->n_kept,
                                 .slot_bytes = r->slot_bytes};
    for (uint32_t i = 0; i < r->n_records; i++) out->bytes += r->records[i].bytes;
    for (uint32_t i = 0; i < r->n_uses; i++) out->step_bytes += r->records[r->uses[i].record].bytes;
}

void cflow_model_expert_uses(const cflow_model *model, uint64_t *uses) {
    if (model->tier)
        tier_uses(model->tier, uses);
    else
        memset(uses, 0, model->weights.header.n_records * sizeof *uses);
}

cflow_status cflow_model_warm(const cflow_model *model, const uint64_t *uses,
                              cflow_progress *progress, cflow_error *err) {
    return model->tier ? tier_warm(model->tier, uses, progress, err) : CFLOW_OK;
}

static void write_rows(const matrix *w, uint32_t first, uint32_t n, float *out) {
    for (uint32_t row = first; row < first + n; row++, out += w->n_cols)
        if (!w->stripe_rows)
            memcpy(out, w->data, w->stripe_bytes);
        else
            stripe_row(w->encoding, w->data + row / w->stripe_rows * w->stripe_stride,
                       w->stripe_rows, w->n_cols, row % w->stripe_rows, out);
}

static cflow_status write_expert_rows(const cflow_model *model, const cflow_tensor *t,
                                      uint32_t expert, uint32_t first, uint32_t n, float *out,
                                      cflow_error *err) {
    const model_weights *m = &model->weights;
    tier *records = model->tier;
    const uint32_t record = m->first_record[t->block] + expert;
    const uint32_t n_experts = m->first_record[t->block + 1] - m->first_record[t->block];
    if (expert >= n_experts) return fail(err, CFLOW_EINVAL, "expert %u of %u", expert, n_experts);
    const uint8_t *bytes = m->expert_data[record];
    if (records) {
        uint32_t which;
        const tier_result result = tier_acquire(records, &record, 1, NULL, &which, &bytes);
        if (result)
            return fail(err, record_status(result), "block %u expert %u: %s", t->block, expert,
                        tier_result_text(result));
    }
    const matrix w = matrix_in_record(tensor_matrix(m, t), bytes);
    write_rows(&w, first, n, out);
    if (records) tier_release(records, record);
    return CFLOW_OK;
}

cflow_status cflow_model_rows(const cflow_model *model, uint32_t index, uint32_t expert,
                              uint32_t first, uint32_t n, float *out, cflow_error *err) {
    const model_weights *m = &model->weights;
    if (m->header_only) return fail(err, CFLOW_EINVAL, "the model was opened without its weights");
    if (index >= m->header.n_tensors)
        return fail(err, CFLOW_EINVAL, "tensor %u of %u", index, m->header.n_tensors);
    const cflow_tensor *t = &m->tensors[index];
    const matrix *w = tensor_matrix(m, t);
    if (first > w->n_rows || n > w->n_rows - first)
        return fail(err, CFLOW_EINVAL, "rows %u and %u more of a tensor of %u", first, n,
                    w->n_rows);
    if (tensor_is_expert(t)) return write_expert_rows(model, t, expert, first, n, out, err);
    const tier_result result = ring_pin_tensor(model->ring, index);
    if (result)
        return fail(err, record_status(result), "matrices of block %u: %s", t->block,
                    tier_result_text(result));
    write_rows(w, first, n, out);
    ring_unpin_tensor(model->ring, index);
    return CFLOW_OK;
}
