/* Opening a model file, step by step from what is trusted least, and its accessors. */
#include "model.h"

#include <string.h>

#include "check.h"
#include "clock.h"
#include "file.h"
#include "kernels.h"
#include "load.h"
#include "plan.h"
#include "ring.h"
#include "status.h"
#include "tensors.h"
#include "widen.h"

enum { MAX_READERS = 256 };

/* ---- opening ---- */

static cflow_status read_header(cflow_model *m, const file *f, cflow_error *err) {
    if (f->bytes < sizeof m->header)
        return fail(err, CFLOW_EFORMAT, "file is truncated: %llu bytes, its header takes %zu",
                    (unsigned long long)f->bytes, sizeof m->header);
    const cflow_status s = file_read(f, &m->header, 0, sizeof m->header, err);
    return s ? s : check_header(&m->header, f->bytes, m->header_only, err);
}

static cflow_status read_section(cflow_model *m, const file *f, uint32_t i, cflow_error *err) {
    const cflow_section *s = &m->header.sections[i];
    uint8_t *data = m->sections[i] = memory_zeroed(s->bytes, 1);
    if (!data)
        return fail(err, CFLOW_ENOMEM, "no memory for section %s: %llu bytes", section_name(i),
                    (unsigned long long)s->bytes);
    const cflow_status status = file_read(f, data, s->offset, s->bytes, err);
    if (status != CFLOW_OK) return status;
    const uint32_t crc = cflow_crc32c(0, data, s->bytes);
    if (crc != s->crc)
        return fail(err, CFLOW_EFORMAT, "section %s: checksum is %08x, the file says %08x",
                    section_name(i), crc, s->crc);
    return CFLOW_OK;
}

static cflow_status read_sections(cflow_model *m, const file *f, cflow_error *err) {
    for (uint32_t i = 0; i < CFLOW_N_SECTIONS; i++) {
        if (section_is_bank(i)) continue;
        const cflow_status s = read_section(m, f, i, err);
        if (s) return s;
    }
    m->layers = (const cflow_layer *)(const void *)m->sections[CFLOW_SECTION_LAYERS];
    m->tensors = (const cflow_tensor *)(const void *)m->sections[CFLOW_SECTION_TENSORS];
    m->records = (const cflow_record *)(const void *)m->sections[CFLOW_SECTION_EXPERTS];
    return CFLOW_OK;
}

static cflow_status check_sections(const cflow_model *m, cflow_error *err) {
    const cflow_header *h = &m->header;
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const cflow_status s = check_layer(h, &m->layers[i], i, err);
        if (s) return s;
    }
    return check_token_bytes(h, m->sections[CFLOW_SECTION_TOKEN_BYTES],
                             h->sections[CFLOW_SECTION_TOKEN_BYTES].bytes, err);
}

static cflow_status check_io(const cflow_model_options *o, cflow_error *err) {
    if (o->expert_io != CFLOW_IO_DIRECT && o->expert_io != CFLOW_IO_CACHED)
        return fail(err, CFLOW_EINVAL, "expert_io is %d; it must be a cflow_io", o->expert_io);
    return CFLOW_OK;
}

static cflow_status check_deferral(const cflow_model *m, int32_t defer, cflow_error *err) {
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < m->header.n_layers; i++)
        if (m->layers[i].n_experts && m->layers[i].top_k < least) least = m->layers[i].top_k;
    if (least == UINT32_MAX)
        return fail(err, CFLOW_EINVAL, "defer_experts is %d, but the model has no experts", defer);
    if (defer < 0 || (uint32_t)defer >= least)
        return fail(err, CFLOW_EINVAL,
                    "defer_experts is %d; a token has %u experts, one of which must stay", defer,
                    least);
    return CFLOW_OK;
}

static cflow_status check_weights_memory(const cflow_model *m, const cflow_model_options *o,
                                         cflow_error *err) {
    if (m->as_f32)
        return fail(err, CFLOW_EINVAL,
                    "weights_memory of %llu bytes, but dequantised weights must all be in memory",
                    (unsigned long long)o->weights_memory);
    return CFLOW_OK;
}

static cflow_status check_expert_cache(const cflow_model *m, const cflow_model_options *o,
                                       cflow_error *err) {
    const unsigned long long bytes = o->expert_cache;
    if (!m->header.n_records)
        return fail(err, CFLOW_EINVAL,
                    "an expert cache of %llu bytes, but the model has no experts", bytes);
    if (m->as_f32)
        return fail(err, CFLOW_EINVAL,
                    "an expert cache of %llu bytes, but dequantised experts must all be in memory",
                    bytes);
    if (o->expert_window < CFLOW_WINDOW_DELAY || o->expert_window > CFLOW_WINDOW_NONE)
        return fail(err, CFLOW_EINVAL, "expert_window is %d; it must be a cflow_window",
                    o->expert_window);
    return CFLOW_OK;
}

tier_options tier_options_of(const cflow_model_options *o, uint64_t budget_bytes,
                             const tier_hooks *hooks) {
    tier_options options = {.budget_bytes = budget_bytes,
                            .timeout_s = o->expert_timeout_s,
                            .max_bytes_per_s = o->expert_bytes_per_s,
                            .n_threads = o->expert_threads,
                            .cached = o->expert_io == CFLOW_IO_CACHED};
    if (hooks) options.hooks = *hooks;
    return options;
}

/* A read that hangs keeps a slot; where each record has one, that is in nobody's way. */
static uint32_t most_pinned(const cflow_model *m, int32_t n_reads) {
    const uint32_t n = tier_slots(m->tier);
    return n == m->header.n_records ? n : n - (uint32_t)n_reads;
}

static cflow_status open_tier(cflow_model *m, file *f, const cflow_model_options *o,
                              const tier_hooks *hooks, cflow_error *err) {
    const uint32_t n = m->header.n_records;
    const uint64_t bank = m->header.sections[CFLOW_SECTION_EXPERT_BANK].offset;
    tier_record *records = memory_zeroed(n, sizeof *records);
    if (!records) return fail(err, CFLOW_ENOMEM, "no memory for %u records", n);
    for (uint32_t i = 0; i < n; i++)
        records[i] = (tier_record){.offset = bank + m->records[i].offset,
                                   .bytes = record_bytes(&m->records[i]),
                                   .crc = m->records[i].crc};
    const tier_options options = tier_options_of(o, o->expert_cache, hooks);
    const cflow_status s = tier_open(&m->tier, f, records, n, &options, err);
    memory_free(records);
    if (!s) m->most_pinned = most_pinned(m, o->expert_threads);
    return s;
}

static cflow_status open_model(cflow_model *m, file *f, const cflow_model_options *options,
                               const tier_hooks *hooks, cflow_error *err) {
    cflow_status s = read_header(m, f, err);
    if (!s) s = read_sections(m, f, err);
    if (!s) s = check_sections(m, err);
    if (!s) s = tensors_bind(m, err);
    if (!s && (options->expert_cache || options->weights_memory)) s = check_io(options, err);
    if (!s && options->expert_cache) s = check_expert_cache(m, options, err);
    if (!s && options->weights_memory) s = check_weights_memory(m, options, err);
    if (!s && options->weights_memory) s = ring_cut(m, err);
    if (!s && options->defer_experts) s = check_deferral(m, options->defer_experts, err);
    if (!s && m->header_only && m->as_f32) widen_shapes(m);
    if (!s && !m->header_only) s = load_weights(m, f, options, err);
    if (!s) s = plan_open(&m->plan, m, err);
    if (!s && m->ring) s = ring_schedule(m, options, err);
    if (!s && !m->header_only && m->ring) s = ring_load(m, f, options, hooks, err);
    if (!s && !m->header_only && options->expert_cache) s = open_tier(m, f, options, hooks, err);
    return s;
}

cflow_status model_open(cflow_model **out, const cflow_model_options *options,
                        const tier_hooks *hooks, cflow_error *err) {
    *out = NULL;
    const double start = clock_s();
    if (!options->path || options->n_threads < 1 || options->n_threads > MAX_READERS)
        return fail(err, CFLOW_EINVAL, "a path and 1 to %d readers are needed, not %d", MAX_READERS,
                    options->n_threads);
    cflow_model *m = memory_zeroed(1, sizeof *m);
    if (!m) return fail(err, CFLOW_ENOMEM, "no memory for a model");
    atomic_store(&m->n_holders, 1);
    m->header_only = options->header_only;
    m->as_f32 = options->as_f32;
    m->speculate = options->expert_cache && options->speculate;
    m->defer = (uint32_t)options->defer_experts;
    m->window = (cflow_window)options->expert_window;
    file f;
    cflow_status s = file_open(&f, options->path, err);
    if (!s) {
        s = open_model(m, &f, options, hooks, err);
        file_close(&f);
    }
    if (s) {
        cflow_model_close(m);
        return s;
    }
    m->memory.load_s = clock_s() - start;
    *out = m;
    return CFLOW_OK;
}

cflow_status cflow_model_open(cflow_model **out, const cflow_model_options *options,
                              cflow_error *err) {
    return model_open(out, options, NULL, err);
}

void model_hold(const cflow_model *m) {
    atomic_fetch_add(&((cflow_model *)m)->n_holders, 1);
}

void cflow_model_close(cflow_model *m) {
    if (!m || atomic_fetch_sub(&m->n_holders, 1) > 1) return;
    tier_close(m->tier);
    ring_close(m->ring);
    plan_close(m->plan);
    for (uint32_t i = 0; i < CFLOW_N_SECTIONS; i++) memory_free(m->sections[i]);
    memory_free(m->blocks);
    memory_free(m->expert_data);
    memory_free(m->first_record);
    arena_close(&m->weights);
    memory_free(m);
}

/* ---- accessors ---- */

const cflow_header *cflow_model_header(const cflow_model *model) {
    return &model->header;
}

const cflow_layer *cflow_model_layer(const cflow_model *model, uint32_t layer) {
    return layer < model->header.n_layers ? &model->layers[layer] : NULL;
}

const cflow_tensor *cflow_model_tensor(const cflow_model *model, uint32_t index) {
    return index < model->header.n_tensors ? &model->tensors[index] : NULL;
}

const void *cflow_model_section(const cflow_model *model, uint32_t section, uint64_t *bytes) {
    const int known = section < CFLOW_N_SECTIONS && model->sections[section];
    *bytes = known ? model->header.sections[section].bytes : 0;
    return known ? model->sections[section] : NULL;
}

void cflow_model_memory(const cflow_model *model, cflow_memory *out) {
    *out = model->memory;
    if (model->tier) tier_add_memory(model->tier, out);
    if (model->ring && model->ring->tier) tier_add_memory(model->ring->tier, out);
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
        memset(uses, 0, model->header.n_records * sizeof *uses);
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

static cflow_status write_expert_rows(const cflow_model *m, const cflow_tensor *t, uint32_t expert,
                                      uint32_t first, uint32_t n, float *out, cflow_error *err) {
    const uint32_t record = m->first_record[t->block] + expert;
    const uint32_t n_experts = m->first_record[t->block + 1] - m->first_record[t->block];
    if (expert >= n_experts) return fail(err, CFLOW_EINVAL, "expert %u of %u", expert, n_experts);
    const uint8_t *bytes = m->expert_data[record];
    if (m->tier) {
        uint32_t which;
        const tier_result result = tier_acquire(m->tier, &record, 1, NULL, &which, &bytes);
        if (result)
            return fail(err, record_status(result), "block %u expert %u: %s", t->block, expert,
                        tier_result_text(result));
    }
    const matrix w = matrix_in_record(tensor_matrix(m, t), bytes);
    write_rows(&w, first, n, out);
    if (m->tier) tier_release(m->tier, record);
    return CFLOW_OK;
}

cflow_status cflow_model_rows(const cflow_model *model, uint32_t index, uint32_t expert,
                              uint32_t first, uint32_t n, float *out, cflow_error *err) {
    if (model->header_only)
        return fail(err, CFLOW_EINVAL, "the model was opened without its weights");
    if (index >= model->header.n_tensors)
        return fail(err, CFLOW_EINVAL, "tensor %u of %u", index, model->header.n_tensors);
    const cflow_tensor *t = &model->tensors[index];
    const matrix *w = tensor_matrix(model, t);
    if (first > w->n_rows || n > w->n_rows - first)
        return fail(err, CFLOW_EINVAL, "rows %u and %u more of a tensor of %u", first, n,
                    w->n_rows);
    if (tensor_is_expert(t)) return write_expert_rows(model, t, expert, first, n, out, err);
    const tier_result result = ring_pin(model, index);
    if (result)
        return fail(err, record_status(result), "matrices of block %u: %s", t->block,
                    tier_result_text(result));
    write_rows(w, first, n, out);
    ring_unpin(model, index);
    return CFLOW_OK;
}
