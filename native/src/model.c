/* Opening a model file, step by step from what is trusted least, and its accessors. */
#include "model.h"

#include <string.h>
#include <time.h>

#include "check.h"
#include "file.h"
#include "kernels.h"
#include "load.h"
#include "plan.h"
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

static cflow_status open_model(cflow_model *m, file *f, const cflow_model_options *options,
                               cflow_error *err) {
    cflow_status s = read_header(m, f, err);
    if (!s) s = read_sections(m, f, err);
    if (!s) s = check_sections(m, err);
    if (!s) s = tensors_bind(m, err);
    if (!s && m->header_only && m->as_f32) widen_shapes(m);
    if (!s && !m->header_only) s = load_weights(m, f, options, err);
    if (!s) s = plan_open(&m->plan, m, err);
    return s;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

cflow_status cflow_model_open(cflow_model **out, const cflow_model_options *options,
                              cflow_error *err) {
    *out = NULL;
    const double start = now_s();
    if (!options->path || options->n_threads < 1 || options->n_threads > MAX_READERS)
        return fail(err, CFLOW_EINVAL, "a path and 1 to %d readers are needed, not %d", MAX_READERS,
                    options->n_threads);
    if (options->expert_cache)
        return fail(err, CFLOW_EUNSUPPORTED, "this build keeps all experts in memory");
    cflow_model *m = memory_zeroed(1, sizeof *m);
    if (!m) return fail(err, CFLOW_ENOMEM, "no memory for a model");
    m->header_only = options->header_only;
    m->as_f32 = options->as_f32;
    file f;
    cflow_status s = file_open(&f, options->path, err);
    if (!s) {
        s = open_model(m, &f, options, err);
        file_close(&f);
    }
    if (s) {
        cflow_model_close(m);
        return s;
    }
    m->memory.load_s = now_s() - start;
    *out = m;
    return CFLOW_OK;
}

void cflow_model_close(cflow_model *m) {
    if (!m) return;
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
}

void cflow_model_tier(const cflow_model *model, cflow_tier_stats *out) {
    (void)model;
    *out = (cflow_tier_stats){0};
}

void cflow_model_expert_uses(const cflow_model *model, uint64_t *uses) {
    memset(uses, 0, model->header.n_records * sizeof *uses);
}

cflow_status cflow_model_warm(const cflow_model *model, const uint64_t *uses,
                              cflow_progress *progress, cflow_error *err) {
    (void)model, (void)uses, (void)progress, (void)err;
    return CFLOW_OK;
}

static matrix record_matrix(const cflow_model *m, uint32_t block, uint32_t e, cflow_role role) {
    matrix w = m->blocks[block][role];
    const uint8_t *record = m->expert_data[m->first_record[block] + e];
    w.data = m->header_only ? WEIGHTS_ELSEWHERE : record + w.record_offset;
    return w;
}

matrix model_expert(const cflow_model *m, uint32_t l, uint32_t e, cflow_role role) {
    return record_matrix(m, m->layers[l].block, e, role);
}

cflow_status cflow_model_rows(const cflow_model *model, uint32_t index, uint32_t expert,
                              uint32_t first, uint32_t n, float *out, cflow_error *err) {
    if (model->header_only)
        return fail(err, CFLOW_EINVAL, "the model was opened without its weights");
    if (index >= model->header.n_tensors)
        return fail(err, CFLOW_EINVAL, "tensor %u of %u", index, model->header.n_tensors);
    const cflow_tensor *t = &model->tensors[index];
    matrix w = *tensor_matrix(model, t);
    if (first > w.n_rows || n > w.n_rows - first)
        return fail(err, CFLOW_EINVAL, "rows %u and %u more of a tensor of %u", first, n, w.n_rows);
    if (tensor_is_expert(t)) {
        const uint32_t n_experts =
            model->first_record[t->block + 1] - model->first_record[t->block];
        if (expert >= n_experts)
            return fail(err, CFLOW_EINVAL, "expert %u of %u", expert, n_experts);
        w = record_matrix(model, t->block, expert, (cflow_role)t->role);
    }
    for (uint32_t i = 0; i < n; i++, out += w.n_cols) {
        const uint32_t row = first + i;
        if (!w.stripe_rows)
            memcpy(out, w.data, w.stripe_bytes);
        else
            stripe_row(w.encoding, w.data + row / w.stripe_rows * w.stripe_stride, w.stripe_rows,
                       w.n_cols, row % w.stripe_rows, out);
    }
    return CFLOW_OK;
}
