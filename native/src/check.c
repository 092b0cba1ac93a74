#include "check.h"

#include <float.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "status.h"
#include "weights.h"

typedef unsigned long long ull;

/* Limits: far above any model, and low enough that sums and products of such numbers do not
 * overflow.
 */
enum {
    MAX_LAYERS = 1024,
    MAX_WIDTH = 1 << 20,
    MAX_VOCAB = 1 << 24,
    MAX_CONTEXT = 1 << 24,
    PAGE = 4096
};
static const uint64_t max_file_bytes = 1ull << 50, max_small_section = 1ull << 28;

_Static_assert(sizeof(cflow_header) == 4096 && sizeof(cflow_layer) == 192, "file records");
_Static_assert(sizeof(cflow_tensor) == 48 && sizeof(cflow_record) == 32, "file records");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "file records are read as they are");

/* ---- single fields ---- */

typedef struct { /* a uint32_t field and its range */
    const char *name;
    size_t at; /* offset in the struct */
    uint32_t low, high;
} count_rule;

static cflow_status check_counts(const char *where, const void *record, const count_rule *rules,
                                 size_t n, cflow_error *err) {
    for (size_t i = 0; i < n; i++) {
        uint32_t got;
        memcpy(&got, (const uint8_t *)record + rules[i].at, sizeof got);
        if (got < rules[i].low || got > rules[i].high)
            return fail(err, CFLOW_EFORMAT, "%s: %s is %u; it must be %u to %u", where,
                        rules[i].name, got, rules[i].low, rules[i].high);
    }
    return CFLOW_OK;
}

/* Must be finite and at least `low`; FLT_MIN means above 0. */
static cflow_status check_float(const char *where, const char *name, float got, float low,
                                cflow_error *err) {
    if (got >= low && got <= FLT_MAX) return CFLOW_OK;
    return fail(err, CFLOW_EFORMAT, "%s: %s is %g; it must be finite and %s", where, name,
                (double)got, low > 0 ? "above 0" : "at least 0");
}

static cflow_status check_offset(const char *where, const char *name, float got, cflow_error *err) {
    if (got == 0.0f || got == 1.0f) return CFLOW_OK;
    return fail(err, CFLOW_EFORMAT, "%s: %s is %g; it must be 0 or 1", where, name, (double)got);
}

static cflow_status check_zero(const char *where, const void *field, size_t bytes,
                               cflow_error *err) {
    for (size_t i = 0; i < bytes; i++)
        if (((const uint8_t *)field)[i])
            return fail(err, CFLOW_EFORMAT, "%s: a reserved byte is %u; it must be 0", where,
                        ((const uint8_t *)field)[i]);
    return CFLOW_OK;
}

/* ---- sections ---- */

const char *section_name(uint32_t section) {
    static const char *const names[CFLOW_N_SECTIONS] = {
        "layers",      "tensors",  "experts",       "metadata",    "tokenizer",
        "token bytes", "run CRCs", "resident bank", "expert bank", "spare"};
    return section < CFLOW_N_SECTIONS ? names[section] : "unknown";
}

int section_is_bank(uint32_t section) {
    return section == CFLOW_SECTION_RESIDENT || section == CFLOW_SECTION_EXPERT_BANK;
}

uint64_t n_runs(uint64_t bank_bytes) {
    return (bank_bytes + RUN_BYTES - 1) / RUN_BYTES;
}

static cflow_status check_place(const cflow_header *h, uint32_t i, cflow_error *err) {
    const cflow_section *s = &h->sections[i];
    const char *name = section_name(i);
    if (s->offset % PAGE)
        return fail(err, CFLOW_EFORMAT, "section %s: offset %llu is not a multiple of %d", name,
                    (ull)s->offset, PAGE);
    if (s->bytes && s->offset < PAGE)
        return fail(err, CFLOW_EFORMAT, "section %s overlaps the header: it begins at %llu", name,
                    (ull)s->offset);
    if (s->offset > h->file_bytes || s->bytes > h->file_bytes - s->offset)
        return fail(err, CFLOW_EFORMAT,
                    "section %s: %llu bytes at %llu exceed the file's %llu bytes", name,
                    (ull)s->bytes, (ull)s->offset, (ull)h->file_bytes);
    if (!section_is_bank(i) && s->bytes > max_small_section)
        return fail(err, CFLOW_EFORMAT, "section %s has %llu bytes; at most %llu are allowed", name,
                    (ull)s->bytes, (ull)max_small_section);
    return check_zero(name, &s->reserved, sizeof s->reserved, err);
}

static cflow_status check_overlap(const cflow_header *h, uint32_t i, cflow_error *err) {
    const cflow_section *a = &h->sections[i];
    for (uint32_t j = 0; j < i; j++) {
        const cflow_section *b = &h->sections[j];
        if (a->bytes && b->bytes && a->offset < b->offset + b->bytes &&
            b->offset < a->offset + a->bytes)
            return fail(err, CFLOW_EFORMAT,
                        "sections %s (%llu bytes at %llu) and %s (%llu bytes at %llu) overlap",
                        section_name(j), (ull)b->bytes, (ull)b->offset, section_name(i),
                        (ull)a->bytes, (ull)a->offset);
    }
    return CFLOW_OK;
}

static cflow_status check_size(const cflow_header *h, uint32_t i, uint64_t want, const char *why,
                               cflow_error *err) {
    if (h->sections[i].bytes == want) return CFLOW_OK;
    return fail(err, CFLOW_EFORMAT, "section %s has %llu bytes, but %s take %llu", section_name(i),
                (ull)h->sections[i].bytes, why, (ull)want);
}

static cflow_status check_sections(const cflow_header *h, cflow_error *err) {
    cflow_status s = CFLOW_OK;
    for (uint32_t i = 0; i < CFLOW_N_SECTIONS && !s; i++) s = check_place(h, i, err);
    for (uint32_t i = 0; i < CFLOW_N_SECTIONS && !s; i++) s = check_overlap(h, i, err);
    if (!s)
        s = check_size(h, CFLOW_SECTION_LAYERS, h->n_layers * sizeof(cflow_layer), "its layers",
                       err);
    if (!s)
        s = check_size(h, CFLOW_SECTION_TENSORS, h->n_tensors * sizeof(cflow_tensor), "its tensors",
                       err);
    if (!s)
        s = check_size(h, CFLOW_SECTION_EXPERTS, h->n_records * sizeof(cflow_record), "its records",
                       err);
    if (!s)
        s = check_size(h, CFLOW_SECTION_RUN_CRCS,
                       n_runs(h->sections[CFLOW_SECTION_RESIDENT].bytes) * sizeof(uint32_t),
                       "the resident bank's checksums", err);
    if (!s) s = check_size(h, CFLOW_N_SECTIONS - 1, 0, "unused ones", err);
    if (!s && h->sections[CFLOW_SECTION_EXPERT_BANK].bytes % RECORD_ALIGN)
        s = fail(err, CFLOW_EFORMAT,
                 "section expert bank has %llu bytes, which is not a multiple of %d",
                 (ull)h->sections[CFLOW_SECTION_EXPERT_BANK].bytes, RECORD_ALIGN);
    if (!s && !h->sections[CFLOW_SECTION_METADATA].bytes)
        s = fail(err, CFLOW_EFORMAT, "section metadata is empty");
    return s;
}

/* ---- the header ---- */

static cflow_status check_identity(const cflow_header *h, cflow_error *err) {
    static const char magic[8] = {'c', 'f', 'l', 'o', 'w', '\r', '\n', '\x1a'};
    if (memcmp(h->magic, magic, sizeof magic))
        return fail(err, CFLOW_EFORMAT,
                    "not a cflow model file: it does not begin with the magic \"cflow\"");
    if (h->version != CFLOW_VERSION)
        return fail(err, CFLOW_EUNSUPPORTED, "file version %u; this build reads version %d",
                    h->version, CFLOW_VERSION);
    const uint32_t crc = cflow_crc32c(0, h, offsetof(cflow_header, crc));
    if (crc != h->crc)
        return fail(err, CFLOW_EFORMAT,
                    "header: checksum is %08x, but the file says %08x: its bytes were altered", crc,
                    h->crc);
    return CFLOW_OK;
}

/* The size that a file must have: all of it, or up to the end of its last small section. */
static uint64_t needed_bytes(const cflow_header *h, int header_only) {
    if (!header_only) return h->file_bytes;
    uint64_t end = sizeof *h;
    for (uint32_t i = 0; i < CFLOW_N_SECTIONS; i++) {
        const cflow_section *s = &h->sections[i];
        if (!section_is_bank(i) && s->bytes && s->offset + s->bytes > end)
            end = s->offset + s->bytes;
    }
    return end;
}

static cflow_status check_file_size(const cflow_header *h, uint64_t bytes, int header_only,
                                    cflow_error *err) {
    const uint64_t needed = needed_bytes(h, header_only);
    if (bytes < needed)
        return fail(err, CFLOW_EFORMAT, "the file is truncated: %llu bytes, its header says %llu",
                    (ull)bytes, (ull)needed);
    if (bytes > needed && !header_only)
        return fail(err, CFLOW_EFORMAT, "the file has %llu bytes, its header says %llu", (ull)bytes,
                    (ull)needed);
    return CFLOW_OK;
}

#define FIELD(name, low, high) {#name, offsetof(cflow_header, name), low, high}

static cflow_status check_header_fields(const cflow_header *h, cflow_error *err) {
    static const count_rule rules[] = {
        FIELD(order, CFLOW_ORDER_LAYER, CFLOW_ORDER_STAGE),
        FIELD(n_layers, 1, MAX_LAYERS),
        FIELD(n_blocks, 1, MAX_LAYERS),
        FIELD(d_model, 1, MAX_WIDTH),
        FIELD(vocab_size, 1, MAX_VOCAB),
        FIELD(n_tokens, 1, MAX_VOCAB),
        FIELD(context, 1, MAX_CONTEXT),
        FIELD(n_tensors, 1, (MAX_LAYERS + 1) * CFLOW_N_ROLES),
        FIELD(n_records, 0, MAX_LAYERS * MAX_EXPERTS),
        FIELD(tied, 0, 1),
        FIELD(final_norm_kind, CFLOW_NORM_RMS, CFLOW_NORM_LAYER),
    };
    cflow_status s = check_counts("header", h, rules, sizeof rules / sizeof *rules, err);
    if (!s) s = check_float("header", "embedding_scale", h->embedding_scale, FLT_MIN, err);
    if (!s) s = check_float("header", "final_norm_eps", h->final_norm_eps, 0, err);
    if (!s) s = check_offset("header", "final_norm_offset", h->final_norm_offset, err);
    if (!s) s = check_float("header", "logit_scale", h->logit_scale, 0, err);
    if (!s) s = check_float("header", "logit_cap", h->logit_cap, 0, err);
    if (!s) s = check_zero("header", h->reserved, sizeof h->reserved, err);
    if (!s && h->n_tokens > h->vocab_size)
        s = fail(err, CFLOW_EFORMAT, "header: n_tokens %u exceeds vocab_size %u", h->n_tokens,
                 h->vocab_size);
    if (!s && h->n_blocks > h->n_layers)
        s = fail(err, CFLOW_EFORMAT, "header: n_blocks %u exceeds n_layers %u", h->n_blocks,
                 h->n_layers);
    if (!s && (h->file_bytes > max_file_bytes || h->file_bytes % PAGE))
        s = fail(err, CFLOW_EFORMAT,
                 "header: file_bytes is %llu; it must be a multiple of %d, at most %llu",
                 (ull)h->file_bytes, PAGE, (ull)max_file_bytes);
    return s;
}
#undef FIELD

cflow_status check_header(const cflow_header *h, uint64_t file_bytes, int header_only,
                          cflow_error *err) {
    cflow_status s = check_identity(h, err);
    if (!s) s = check_header_fields(h, err);
    if (!s) s = check_sections(h, err);
    if (!s) s = check_file_size(h, file_bytes, header_only, err);
    return s;
}

/* ---- layers ---- */

#define FIELD(name, low, high) {#name, offsetof(cflow_layer, name), low, high}

static const count_rule layer_rules[] = {
    FIELD(n_heads, 1, MAX_WIDTH),
    FIELD(n_kv_heads, 1, MAX_WIDTH),
    FIELD(head_dim, 1, MAX_HEAD_DIM),
    FIELD(qk_norm, CFLOW_QK_NORM_NONE, CFLOW_QK_NORM_ROTATED),
    FIELD(v_norm, 0, 1),
    FIELD(rope_kind, CFLOW_ROPE_NONE, CFLOW_ROPE_INTERLEAVED),
    FIELD(rope_dim, 0, MAX_HEAD_DIM),
    FIELD(rope_scaling, CFLOW_ROPE_PLAIN, CFLOW_ROPE_LLAMA3),
    FIELD(d_ff, 0, MAX_WIDTH),
    FIELD(activation, CFLOW_SILU, CFLOW_GELU_ERF),
    FIELD(activation_on_up, 0, 1),
    FIELD(n_experts, 0, MAX_EXPERTS),
    FIELD(renormalise, 0, 1),
    FIELD(d_shared, 0, MAX_WIDTH),
    FIELD(shared_gate, 0, 1),
    FIELD(norms_shared, 0, 1),
    FIELD(dense_source, CFLOW_POST_ATTENTION, CFLOW_X_IN_PREVIOUS),
    FIELD(expert_anchor, CFLOW_POST_ATTENTION, CFLOW_X_IN),
    FIELD(expert_delay, 0, MAX_LAYERS),
    FIELD(norm_kind, CFLOW_NORM_RMS, CFLOW_NORM_LAYER),
    FIELD(norm_place, CFLOW_NORM_BEFORE, CFLOW_NORM_AROUND),
    FIELD(ungated, 0, 1),
    FIELD(query_start, 0, MAX_CONTEXT),
};
static const count_rule expert_rules[] = {
    FIELD(top_k, 1, MAX_EXPERTS),
    FIELD(d_expert, 1, MAX_WIDTH),
};
#undef FIELD

static cflow_status check_heads(const char *where, const cflow_layer *l, cflow_error *err) {
    if (l->n_heads % l->n_kv_heads)
        return fail(err, CFLOW_EFORMAT,
                    "%s: n_heads is %u; it must be a multiple of n_kv_heads, %u", where, l->n_heads,
                    l->n_kv_heads);
    if ((uint64_t)l->n_heads * l->head_dim > MAX_WIDTH)
        return fail(err, CFLOW_EFORMAT, "%s: %u heads of %u dimensions are wider than %d", where,
                    l->n_heads, l->head_dim, MAX_WIDTH);
    cflow_status s = check_float(where, "attention_scale", l->attention_scale, FLT_MIN, err);
    if (!s) s = check_float(where, "score_cap", l->score_cap, 0, err);
    if (!s) s = check_float(where, "query_growth", l->query_growth, 0, err);
    if (!s && l->query_growth > 0 && !l->query_period)
        s = fail(err, CFLOW_EFORMAT, "%s: query_period is 0; with query_growth it must be above 0",
                 where);
    return s;
}

static cflow_status check_rope(const char *where, const cflow_layer *l, cflow_error *err) {
    if (l->rope_kind == CFLOW_ROPE_NONE) return CFLOW_OK;
    if (l->rope_dim == 0 || l->rope_dim % 2 || l->rope_dim > l->head_dim)
        return fail(err, CFLOW_EFORMAT, "%s: rope_dim is %u; it must be even, 2 to head_dim %u",
                    where, l->rope_dim, l->head_dim);
    cflow_status s = check_float(where, "rope_base", l->rope_base, FLT_MIN, err);
    if (!s) s = check_float(where, "rope_gain", l->rope_gain, 0, err);
    if (!s && l->rope_scaling != CFLOW_ROPE_PLAIN)
        s = check_float(where, "rope_factor", l->rope_factor, FLT_MIN, err);
    if (s || l->rope_scaling != CFLOW_ROPE_LLAMA3) return s;
    s = check_float(where, "rope_low_freq", l->rope_low_freq, FLT_MIN, err);
    if (!s) s = check_float(where, "rope_high_freq", l->rope_high_freq, FLT_MIN, err);
    if (!s && (l->rope_high_freq <= l->rope_low_freq || !l->rope_original_context))
        s = fail(err, CFLOW_EFORMAT,
                 "%s: rope_high_freq %g must exceed rope_low_freq %g, and rope_original_context be "
                 "above 0",
                 where, (double)l->rope_high_freq, (double)l->rope_low_freq);
    return s;
}

static cflow_status check_experts(const char *where, const cflow_layer *l, cflow_error *err) {
    if (!l->n_experts && (l->d_shared || l->shared_gate))
        return fail(err, CFLOW_EFORMAT, "%s: it has a shared expert but no experts", where);
    if (!l->n_experts) return CFLOW_OK;
    if (l->norm_place != CFLOW_NORM_BEFORE)
        return fail(err, CFLOW_EFORMAT, "%s: norm_place is %u; with experts it must be %d", where,
                    l->norm_place, CFLOW_NORM_BEFORE);
    if (l->shared_gate && !l->d_shared)
        return fail(err, CFLOW_EFORMAT, "%s: shared_gate is 1, but it has no shared expert", where);
    cflow_status s =
        check_counts(where, l, expert_rules, sizeof expert_rules / sizeof *expert_rules, err);
    if (!s && l->top_k > l->n_experts)
        s = fail(err, CFLOW_EFORMAT, "%s: top_k is %u, but there are %u experts", where, l->top_k,
                 l->n_experts);
    if (!s) s = check_float(where, "expert_scale", l->expert_scale, FLT_MIN, err);
    return s;
}

cflow_status check_layer(const cflow_header *h, const cflow_layer *l, uint32_t index,
                         cflow_error *err) {
    char where[32];
    snprintf(where, sizeof where, "layer %u", index);
    cflow_status s =
        check_counts(where, l, layer_rules, sizeof layer_rules / sizeof *layer_rules, err);
    if (!s && l->block >= h->n_blocks)
        s = fail(err, CFLOW_EFORMAT, "%s: block is %u, but there are %u", where, l->block,
                 h->n_blocks);
    if (!s) s = check_heads(where, l, err);
    if (!s) s = check_rope(where, l, err);
    if (!s) s = check_experts(where, l, err);
    if (!s) s = check_float(where, "norm_eps", l->norm_eps, 0, err);
    if (!s) s = check_offset(where, "norm_offset", l->norm_offset, err);
    if (!s) s = check_float(where, "residual_scale", l->residual_scale, FLT_MIN, err);
    if (!s) s = check_zero(where, l->reserved, sizeof l->reserved, err);
    return s;
}

/* ---- token bytes ---- */

cflow_status check_token_bytes(const cflow_header *h, const uint8_t *section, uint64_t bytes,
                               cflow_error *err) {
    uint32_t n = 0, end = 0;
    if (bytes >= sizeof n) memcpy(&n, section, sizeof n);
    if (n != h->n_tokens)
        return fail(err, CFLOW_EFORMAT, "token bytes: %u tokens, but the header says %u", n,
                    h->n_tokens);
    const uint64_t table = sizeof n + (uint64_t)n * (sizeof end + 1);
    if (bytes < table)
        return fail(err, CFLOW_EFORMAT, "token bytes: %llu bytes, but %u tokens take %llu or more",
                    (ull)bytes, n, (ull)table);
    for (uint32_t i = 0, before = 0; i < n; i++, before = end) {
        memcpy(&end, section + sizeof n + i * sizeof end, sizeof end);
        if (end < before || end > bytes - table)
            return fail(err, CFLOW_EFORMAT,
                        "token bytes: token %u ends at %u; it must end between %u and %llu", i, end,
                        before, (ull)(bytes - table));
    }
    if (end != bytes - table)
        return fail(err, CFLOW_EFORMAT,
                    "token bytes: the last token ends at %u, but there are %llu bytes", end,
                    (ull)(bytes - table));
    return CFLOW_OK;
}
