#include "model_open.h"

#include "check.h"
#include "clock.h"
#include "file.h"
#include "kernels.h"
#include "load.h"
#include "status.h"
#include "tensors.h"
#include "widen.h"

enum { MAX_READERS = 256 };

/* ---- headers and tables: each part is checked before the next one relies on it ---- */

static cflow_status read_header(model_weights *m, const file *f, cflow_error *err) {
    if (f->bytes < sizeof m->header)
        return fail(err, CFLOW_EFORMAT, "file is truncated: %llu bytes, its header takes %zu",
                    (unsigned long long)f->bytes, sizeof m->header);
    const cflow_status s = file_read(f, &m->header, 0, sizeof m->header, err);
    return s ? s : check_header(&m->header, f->bytes, m->header_only, err);
}

static cflow_status read_section(model_weights *m, const file *f, uint32_t i, cflow_error *err) {
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

static cflow_status read_sections(model_weights *m, const file *f, cflow_error *err) {
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

static cflow_status check_sections(const model_weights *m, cflow_error *err) {
    const cflow_header *h = &m->header;
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const cflow_status s = check_layer(h, &m->layers[i], i, err);
        if (s) return s;
    }
    return check_token_bytes(h, m->sections[CFLOW_SECTION_TOKEN_BYTES],
                             h->sections[CFLOW_SECTION_TOKEN_BYTES].bytes, err);
}

static cflow_status read_tables(model_weights *m, const file *f, cflow_error *err) {
    cflow_status s = read_header(m, f, err);
    if (!s) s = read_sections(m, f, err);
    if (!s) s = check_sections(m, err);
    return s ? s : tensors_bind(m, err);
}

/* ---- options that the model must allow ---- */

static cflow_status check_io(const cflow_model_options *o, cflow_error *err) {
    if (o->expert_io != CFLOW_IO_DIRECT && o->expert_io != CFLOW_IO_CACHED)
        return fail(err, CFLOW_EINVAL, "expert_io is %d; it must be a cflow_io", o->expert_io);
    return CFLOW_OK;
}

static cflow_status check_deferral(const model_weights *m, int32_t defer, cflow_error *err) {
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

static cflow_status check_weights_memory(const model_weights *m, const cflow_model_options *o,
                                         cflow_error *err) {
    if (m->as_f32)
        return fail(err, CFLOW_EINVAL,
                    "weights_memory of %llu bytes, but dequantised weights must all be in memory",
                    (unsigned long long)o->weights_memory);
    return CFLOW_OK;
}

static cflow_status check_expert_cache(const model_weights *m, const cflow_model_options *o,
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

static cflow_status check_options(const model_weights *m, const cflow_model_options *o,
                                  cflow_error *err) {
    cflow_status s = CFLOW_OK;
    if (o->expert_cache || o->weights_memory) s = check_io(o, err);
    if (!s && o->expert_cache) s = check_expert_cache(m, o, err);
    if (!s && o->weights_memory) s = check_weights_memory(m, o, err);
    if (!s && o->defer_experts) s = check_deferral(m, o->defer_experts, err);
    return s;
}

/* ---- opening ---- */

static tier_options read_options(const cflow_model_options *o, const tier_hooks *hooks) {
    tier_options options = {.budget_bytes = o->expert_cache,
                            .timeout_s = o->expert_timeout_s,
                            .max_bytes_per_s = o->expert_bytes_per_s,
                            .n_threads = o->expert_reads,
                            .cached = o->expert_io == CFLOW_IO_CACHED};
    if (hooks) options.hooks = *hooks;
    return options;
}

/* Most slots that a step may pin: all but one for each read in flight, as a read that hangs keeps
 * its slot; all if every record has a slot of its own. */
static uint32_t most_pinned(const tier *t, uint32_t n_records, int32_t n_reads) {
    const uint32_t n = tier_slots(t);
    return n == n_records ? n : n - (uint32_t)n_reads;
}

static cflow_status open_tier(cflow_model *model, file *f, const tier_options *options,
                              cflow_error *err) {
    const model_weights *m = &model->weights;
    const uint32_t n = m->header.n_records;
    const uint64_t bank = m->header.sections[CFLOW_SECTION_EXPERT_BANK].offset;
    tier_record *records = memory_zeroed(n, sizeof *records);
    if (!records) return fail(err, CFLOW_ENOMEM, "no memory for %u records", n);
    for (uint32_t i = 0; i < n; i++)
        records[i] = (tier_record){.offset = bank + m->records[i].offset,
                                   .bytes = record_bytes(&m->records[i]),
                                   .crc = m->records[i].crc};
    const cflow_status s = tier_open(&model->tier, f, records, n, options, err);
    memory_free(records);
    if (!s) model->most_pinned = most_pinned(model->tier, n, options->n_threads);
    return s;
}

/* Reads the weights that stay in memory; without weights only describes them. */
static cflow_status load_resident(cflow_model *model, file *f, const cflow_model_options *options,
                                  cflow_error *err) {
    model_weights *m = &model->weights;
    if (!m->header_only) return load_weights(m, model->ring, f, options, &model->memory, err);
    if (m->as_f32) widen_shapes(m);
    return CFLOW_OK;
}

static cflow_status open_model(cflow_model *model, file *f, const cflow_model_options *options,
                               const tier_hooks *hooks, cflow_error *err) {
    model_weights *m = &model->weights;
    const graph_options building = {.speculate = options->expert_cache && options->speculate,
                                    .defer = (uint32_t)options->defer_experts,
                                    .window = (cflow_window)options->expert_window};
    const tier_options reads = read_options(options, hooks);
    cflow_status s = read_tables(m, f, err);
    if (!s) s = check_options(m, options, err);
    if (!s && options->weights_memory) s = ring_cut(&model->ring, m, err);
    if (!s) s = load_resident(model, f, options, err);
    if (!s) s = plan_open(&model->plan, m, building, err);
    if (!s && model->ring) s = ring_schedule(model->ring, model->plan, options, err);
    if (s || m->header_only) return s;
    if (model->ring) s = ring_load(model->ring, f, &reads, options->progress, err);
    if (!s && options->expert_cache) s = open_tier(model, f, &reads, err);
    return s;
}

static cflow_status open_path(cflow_model *model, const cflow_model_options *options,
                              const tier_hooks *hooks, cflow_error *err) {
    file f;
    cflow_status s = file_open(&f, options->path, err);
    if (s) return s;
    s = open_model(model, &f, options, hooks, err);
    file_close(&f);
    return s;
}

cflow_status model_open(cflow_model **out, const cflow_model_options *options,
                        const tier_hooks *hooks, cflow_error *err) {
    *out = NULL;
    const double start = clock_s();
    if (!options->path || options->n_threads < 1 || options->n_threads > MAX_READERS)
        return fail(err, CFLOW_EINVAL, "a path and 1 to %d readers are needed, not %d", MAX_READERS,
                    options->n_threads);
    cflow_model *model = memory_zeroed(1, sizeof *model);
    if (!model) return fail(err, CFLOW_ENOMEM, "no memory for a model");
    atomic_store(&model->n_holders, 1);
    model->weights.header_only = options->header_only;
    model->weights.as_f32 = options->as_f32;
    const cflow_status s = open_path(model, options, hooks, err);
    if (s) {
        cflow_model_close(model);
        return s;
    }
    model->memory.load_s = clock_s() - start;
    *out = model;
    return CFLOW_OK;
}

cflow_status cflow_model_open(cflow_model **out, const cflow_model_options *options,
                              cflow_error *err) {
    return model_open(out, options, NULL, err);
}
