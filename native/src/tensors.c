#include "tensors.h"

#include <stdio.h>
#include <string.h>

#include "check.h"
#include "kernels.h"
#include "status.h"

typedef unsigned long long ull;

static const char *const role_names[CFLOW_N_ROLES] = {"embedding",
                                                      "head",
                                                      "final_norm",
                                                      "norm1",
                                                      "norm2",
                                                      "norm3",
                                                      "q",
                                                      "k",
                                                      "v",
                                                      "o",
                                                      "q_bias",
                                                      "k_bias",
                                                      "v_bias",
                                                      "o_bias",
                                                      "q_norm",
                                                      "k_norm",
                                                      "gate",
                                                      "up",
                                                      "down",
                                                      "router",
                                                      "shared_gate",
                                                      "shared_up",
                                                      "shared_down",
                                                      "shared_scale",
                                                      "expert_gate",
                                                      "expert_up",
                                                      "expert_down",
                                                      "post_norm1",
                                                      "post_norm2",
                                                      "norm1_bias",
                                                      "norm2_bias",
                                                      "final_norm_bias",
                                                      "gate_bias",
                                                      "up_bias",
                                                      "down_bias",
                                                      "rope_divisors",
                                                      "rope_divisors_long"};

/* ---- what the layers need ---- */

typedef enum { UNUSED = 0, OPTIONAL, REQUIRED } need;
typedef enum { MATRIX = 0, F32_MATRIX, VECTOR } form;
typedef struct {
    uint32_t n_rows, n_cols;
    need need;
    form form;
} want;

static want want_matrix(uint32_t n_rows, uint32_t n_cols, form f) {
    return (want){.n_rows = n_rows, .n_cols = n_cols, .need = REQUIRED, .form = f};
}
static want want_vector(uint32_t n, need wanted) {
    return (want){.n_rows = 1, .n_cols = n, .need = wanted, .form = VECTOR};
}

static void want_gated(want *gate, uint32_t width, uint32_t d) {
    gate[0] = gate[1] = want_matrix(width, d, MATRIX);
    gate[2] = want_matrix(d, width, MATRIX);
}

static void want_norms(const cflow_layer *l, uint32_t d, want w[CFLOW_N_ROLES]) {
    const int reads_norm2 = l->d_ff || (l->n_experts && l->norms_shared);
    if (l->norm_place != CFLOW_NORM_AFTER) {
        w[CFLOW_NORM1] = want_vector(d, REQUIRED);
        if (reads_norm2) w[CFLOW_NORM2] = want_vector(d, REQUIRED);
    }
    if (l->norm_place != CFLOW_NORM_BEFORE) {
        w[CFLOW_POST_NORM1] = want_vector(d, REQUIRED);
        if (l->d_ff) w[CFLOW_POST_NORM2] = want_vector(d, REQUIRED);
    }
    if (l->norm_kind != CFLOW_NORM_LAYER) return;
    w[CFLOW_NORM1_BIAS] = want_vector(d, OPTIONAL);
    if (reads_norm2) w[CFLOW_NORM2_BIAS] = want_vector(d, OPTIONAL);
}

static void want_rope(const cflow_layer *l, want w[CFLOW_N_ROLES]) {
    if (l->rope_kind == CFLOW_ROPE_NONE) return;
    w[CFLOW_ROPE_DIVISORS] = want_vector(l->rope_dim / 2, OPTIONAL);
    w[CFLOW_ROPE_DIVISORS_LONG] = want_vector(l->rope_dim / 2, OPTIONAL);
}

static void want_dense(const cflow_layer *l, uint32_t d, want w[CFLOW_N_ROLES]) {
    want_gated(&w[CFLOW_GATE], l->d_ff, d);
    w[CFLOW_GATE_BIAS] = w[CFLOW_UP_BIAS] = want_vector(l->d_ff, OPTIONAL);
    w[CFLOW_DOWN_BIAS] = want_vector(d, OPTIONAL);
    if (l->ungated) w[CFLOW_GATE] = w[CFLOW_GATE_BIAS] = (want){0};
}

static void want_attention(const cflow_layer *l, uint32_t d, want w[CFLOW_N_ROLES]) {
    const uint32_t q = l->n_heads * l->head_dim, kv = l->n_kv_heads * l->head_dim;
    w[CFLOW_Q] = want_matrix(q, d, MATRIX);
    w[CFLOW_K] = w[CFLOW_V] = want_matrix(kv, d, MATRIX);
    w[CFLOW_O] = want_matrix(d, q, MATRIX);
    w[CFLOW_Q_BIAS] = want_vector(q, OPTIONAL);
    w[CFLOW_K_BIAS] = w[CFLOW_V_BIAS] = want_vector(kv, OPTIONAL);
    w[CFLOW_O_BIAS] = want_vector(d, OPTIONAL);
    if (l->qk_norm == CFLOW_QK_NORM_NONE) return;
    const int by_head = l->qk_norm != CFLOW_QK_NORM_FULL;
    w[CFLOW_Q_NORM] = want_vector(by_head ? l->head_dim : q, REQUIRED);
    w[CFLOW_K_NORM] = want_vector(by_head ? l->head_dim : kv, REQUIRED);
}

static void layer_wants(const cflow_header *h, const cflow_layer *l, want w[CFLOW_N_ROLES]) {
    const uint32_t d = h->d_model;
    memset(w, 0, CFLOW_N_ROLES * sizeof *w);
    want_norms(l, d, w);
    want_attention(l, d, w);
    want_rope(l, w);
    if (l->d_ff) want_dense(l, d, w);
    if (!l->n_experts) return;
    if (!l->norms_shared) w[CFLOW_NORM3] = want_vector(d, REQUIRED);
    w[CFLOW_ROUTER] = want_matrix(l->n_experts, d, F32_MATRIX);
    want_gated(&w[CFLOW_EXPERT_GATE], l->d_expert, d);
    if (l->d_shared) want_gated(&w[CFLOW_SHARED_GATE], l->d_shared, d);
    if (l->shared_gate) w[CFLOW_SHARED_SCALE] = want_matrix(1, d, F32_MATRIX);
}

static void model_wants(const cflow_header *h, want w[CFLOW_N_ROLES]) {
    memset(w, 0, CFLOW_N_ROLES * sizeof *w);
    w[CFLOW_EMBEDDING] = want_matrix(h->vocab_size, h->d_model, MATRIX);
    w[CFLOW_FINAL_NORM] = want_vector(h->d_model, REQUIRED);
    if (h->final_norm_kind == CFLOW_NORM_LAYER)
        w[CFLOW_FINAL_NORM_BIAS] = want_vector(h->d_model, OPTIONAL);
    if (!h->tied) w[CFLOW_HEAD] = want_matrix(h->vocab_size, h->d_model, MATRIX);
}

static int same_want(const want *a, const want *b) {
    return a->n_rows == b->n_rows && a->n_cols == b->n_cols && a->need == b->need &&
           a->form == b->form;
}

/* first_layer (n_blocks,): the first layer that uses each weight block. All layers that share a
 * block must need the same tensors. */
static cflow_status find_users(const model_weights *m, uint32_t *first_layer, cflow_error *err) {
    const cflow_header *h = &m->header;
    want first[CFLOW_N_ROLES], here[CFLOW_N_ROLES];
    for (uint32_t b = 0; b < h->n_blocks; b++) first_layer[b] = UINT32_MAX;
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const uint32_t b = m->layers[i].block;
        if (first_layer[b] == UINT32_MAX) first_layer[b] = i;
        layer_wants(h, &m->layers[first_layer[b]], first);
        layer_wants(h, &m->layers[i], here);
        for (uint32_t role = 0; role < CFLOW_N_ROLES; role++)
            if (!same_want(&first[role], &here[role]))
                return fail(err, CFLOW_EFORMAT,
                            "layers %u and %u share block %u but need its %s as %u x %u and %u x "
                            "%u",
                            first_layer[b], i, b, role_names[role], first[role].n_rows,
                            first[role].n_cols, here[role].n_rows, here[role].n_cols);
    }
    for (uint32_t b = 0; b < h->n_blocks; b++)
        if (first_layer[b] == UINT32_MAX)
            return fail(err, CFLOW_EFORMAT, "block %u of %u belongs to no layer", b, h->n_blocks);
    return CFLOW_OK;
}

/* ---- expert records ---- */

uint64_t record_bytes(const cflow_record *r) {
    return round_up(r->bytes, RECORD_ALIGN);
}

static cflow_status check_record(const cflow_record *r, uint32_t block, uint32_t expert,
                                 uint64_t bank_bytes, cflow_error *err) {
    if (r->block != block || r->expert != expert)
        return fail(
            err, CFLOW_EFORMAT,
            "expert records are out of order: block %u expert %u is in the place of block %u "
            "expert %u",
            r->block, r->expert, block, expert);
    if (r->offset % RECORD_ALIGN || r->offset > bank_bytes || r->bytes > bank_bytes - r->offset)
        return fail(err, CFLOW_EFORMAT,
                    "record of block %u expert %u: %llu bytes at %llu; it must begin on %d and lie "
                    "within the bank's %llu",
                    block, expert, (ull)r->bytes, (ull)r->offset, RECORD_ALIGN, (ull)bank_bytes);
    if (r->reserved)
        return fail(err, CFLOW_EFORMAT,
                    "record of block %u expert %u: reserved is %u; it must be 0", block, expert,
                    r->reserved);
    return CFLOW_OK;
}

/* Checks that there is one record for each expert, in order, and that they fit into the bank. */
static cflow_status bind_records(model_weights *m, const uint32_t *first_layer, cflow_error *err) {
    const cflow_header *h = &m->header;
    const uint64_t bank_bytes = h->sections[CFLOW_SECTION_EXPERT_BANK].bytes;
    uint64_t wanted = 0, bytes = 0;
    for (uint32_t b = 0; b < h->n_blocks; b++) {
        m->first_record[b] = (uint32_t)wanted;
        wanted += m->layers[first_layer[b]].n_experts;
    }
    m->first_record[h->n_blocks] = (uint32_t)wanted;
    if (wanted != h->n_records)
        return fail(err, CFLOW_EFORMAT, "the layers need %llu expert records, but the file has %u",
                    (ull)wanted, h->n_records);
    for (uint32_t b = 0; b < h->n_blocks; b++)
        for (uint32_t i = m->first_record[b]; i < m->first_record[b + 1]; i++) {
            const cflow_status s =
                check_record(&m->records[i], b, i - m->first_record[b], bank_bytes, err);
            if (s) return s;
            bytes += record_bytes(&m->records[i]);
        }
    if (bytes > bank_bytes)
        return fail(err, CFLOW_EFORMAT,
                    "expert records overlap: they take %llu bytes, the bank %llu", (ull)bytes,
                    (ull)bank_bytes);
    return CFLOW_OK;
}

/* ---- tensors ---- */

void tensor_name(char out[64], const cflow_tensor *t) {
    const char *role = t->role < CFLOW_N_ROLES ? role_names[t->role] : "of unknown role";
    if (t->block == CFLOW_MODEL_LEVEL)
        snprintf(out, 64, "%s", role);
    else
        snprintf(out, 64, "block %u %s", t->block, role);
}

int tensor_is_expert(const cflow_tensor *t) {
    return t->role >= CFLOW_EXPERT_GATE && t->role <= CFLOW_EXPERT_DOWN;
}

const matrix *tensor_matrix(const model_weights *m, const cflow_tensor *t) {
    return t->block == CFLOW_MODEL_LEVEL ? &m->global[t->role] : &m->blocks[t->block][t->role];
}

matrix *tensor_entry(model_weights *m, const cflow_tensor *t) {
    return t->block == CFLOW_MODEL_LEVEL ? &m->global[t->role] : &m->blocks[t->block][t->role];
}

uint32_t tensor_of(const model_weights *m, const matrix *w) {
    uint32_t i = 0;
    while (i < m->header.n_tensors && tensor_matrix(m, &m->tensors[i]) != w) i++;
    return i;
}

static uint32_t n_stripes(const cflow_tensor *t) {
    return t->stripe_rows ? (t->n_rows - 1) / t->stripe_rows + 1 : 1;
}

static uint64_t last_stripe_bytes(const cflow_tensor *t) {
    return t->stripe_rows ? stripe_bytes(t->encoding, t->stripe_rows, t->n_cols)
                          : sizeof(float) * (uint64_t)t->n_cols;
}

uint64_t tensor_end(const cflow_tensor *t) {
    return t->offset + (n_stripes(t) - 1) * t->stripe_stride + last_stripe_bytes(t);
}

/* The largest of 128, 96, 64 and 32 that divides n_rows rounded up to 32, so that no stripe is
 * padded further. */
static uint32_t stripe_rows_of(uint32_t n_rows) {
    const uint32_t padded = (n_rows + 31) / 32 * 32;
    uint32_t rows = 128;
    while (padded % rows) rows -= 32;
    return rows;
}

static cflow_status check_form(const cflow_tensor *t, const want *w, const char *name,
                               cflow_error *err) {
    if (w->need == UNUSED) return fail(err, CFLOW_EFORMAT, "tensor %s: no layer uses it", name);
    if (t->n_rows != w->n_rows || t->n_cols != w->n_cols)
        return fail(err, CFLOW_EFORMAT, "tensor %s: %u x %u, but the layers need %u x %u", name,
                    t->n_rows, t->n_cols, w->n_rows, w->n_cols);
    if (t->encoding >= CFLOW_N_ENCODINGS)
        return fail(err, CFLOW_EFORMAT, "tensor %s: encoding %u is unknown", name, t->encoding);
    if (w->form != MATRIX && t->encoding != CFLOW_F32)
        return fail(err, CFLOW_EFORMAT, "tensor %s: encoding is %u; it must be f32 (%d)", name,
                    t->encoding, CFLOW_F32);
    const uint32_t rows = w->form == VECTOR ? 0 : stripe_rows_of(t->n_rows);
    if (t->stripe_rows != rows)
        return fail(err, CFLOW_EFORMAT, "tensor %s: stripe_rows is %u; for %u rows it must be %u",
                    name, t->stripe_rows, t->n_rows, rows);
    return CFLOW_OK;
}

/* limit: bytes of the bank or record that the tensor is in. No sum here overflows. */
static cflow_status check_extent(const cflow_tensor *t, uint64_t limit, const char *name,
                                 cflow_error *err) {
    const uint64_t n = n_stripes(t), bytes = last_stripe_bytes(t);
    if (t->offset % 64 || (t->stripe_rows && (t->stripe_stride % 64 || t->stripe_stride < bytes)))
        return fail(err, CFLOW_EFORMAT,
                    "tensor %s: offset %llu, stride %llu for stripes of %llu bytes; both must be "
                    "multiples of 64",
                    name, (ull)t->offset, (ull)t->stripe_stride, (ull)bytes);
    if (t->offset > limit || bytes > limit - t->offset ||
        (n > 1 && t->stripe_stride > (limit - t->offset - bytes) / (n - 1)))
        return fail(err, CFLOW_EFORMAT,
                    "tensor %s: %llu stripes of %llu bytes, %llu apart, from %llu on exceed their "
                    "%s's %llu bytes",
                    name, (ull)n, (ull)bytes, (ull)t->stripe_stride, (ull)t->offset,
                    tensor_is_expert(t) ? "record" : "bank", (ull)limit);
    return CFLOW_OK;
}

/* The smallest record of the block, or the resident bank. */
static uint64_t extent_limit(const model_weights *m, const cflow_tensor *t) {
    if (!tensor_is_expert(t)) return m->header.sections[CFLOW_SECTION_RESIDENT].bytes;
    uint64_t limit = UINT64_MAX;
    for (uint32_t i = m->first_record[t->block]; i < m->first_record[t->block + 1]; i++)
        if (m->records[i].bytes < limit) limit = m->records[i].bytes;
    return limit;
}

static matrix stored_matrix(const cflow_tensor *t) {
    const int is_expert = tensor_is_expert(t);
    return (matrix){
        .data = is_expert ? NULL : WEIGHTS_ELSEWHERE,
        .encoding = t->encoding,
        .n_rows = t->n_rows,
        .n_cols = t->n_cols,
        .stripe_rows = t->stripe_rows,
        .n_stripes = n_stripes(t),
        .n_blocks = t->stripe_rows ? n_column_blocks(t->encoding, t->n_cols) : 0,
        .stripe_stride = t->stripe_stride,
        .stripe_bytes = last_stripe_bytes(t),
        .record_offset = is_expert ? t->offset : 0,
    };
}

static cflow_status bind_tensor(model_weights *m, const cflow_tensor *t,
                                const uint32_t *first_layer, cflow_error *err) {
    char name[64];
    tensor_name(name, t);
    want wants[CFLOW_N_ROLES];
    if (t->role >= CFLOW_N_ROLES)
        return fail(err, CFLOW_EFORMAT, "tensor %u: role %u is unknown", (uint32_t)(t - m->tensors),
                    t->role);
    if (t->block == CFLOW_MODEL_LEVEL)
        model_wants(&m->header, wants);
    else if (t->block < m->header.n_blocks)
        layer_wants(&m->header, &m->layers[first_layer[t->block]], wants);
    else
        return fail(err, CFLOW_EFORMAT, "tensor %s: there are only %u blocks", name,
                    m->header.n_blocks);
    cflow_status s = check_form(t, &wants[t->role], name, err);
    if (!s) s = check_extent(t, extent_limit(m, t), name, err);
    if (!s && t->reserved)
        s = fail(err, CFLOW_EFORMAT, "tensor %s: reserved is %llu; it must be 0", name,
                 (ull)t->reserved);
    if (!s && tensor_matrix(m, t)->n_cols)
        s = fail(err, CFLOW_EFORMAT, "tensor %s: the file has it twice", name);
    if (!s) *tensor_entry(m, t) = stored_matrix(t);
    return s;
}

static cflow_status check_present(const want wants[CFLOW_N_ROLES], const matrix *have,
                                  uint32_t block, cflow_error *err) {
    for (uint32_t role = 0; role < CFLOW_N_ROLES; role++)
        if (wants[role].need == REQUIRED && !have[role].n_cols) {
            char name[64];
            tensor_name(name, &(cflow_tensor){.role = role, .block = block});
            return fail(err, CFLOW_EFORMAT, "tensor %s is missing: %u x %u", name,
                        wants[role].n_rows, wants[role].n_cols);
        }
    return CFLOW_OK;
}

static cflow_status bind(model_weights *m, uint32_t *first_layer, cflow_error *err) {
    const cflow_header *h = &m->header;
    cflow_status s = find_users(m, first_layer, err);
    if (!s) s = bind_records(m, first_layer, err);
    for (uint32_t i = 0; i < h->n_tensors && !s; i++)
        s = bind_tensor(m, &m->tensors[i], first_layer, err);
    want wants[CFLOW_N_ROLES];
    model_wants(h, wants);
    if (!s) s = check_present(wants, m->global, CFLOW_MODEL_LEVEL, err);
    for (uint32_t b = 0; b < h->n_blocks && !s; b++) {
        layer_wants(h, &m->layers[first_layer[b]], wants);
        s = check_present(wants, m->blocks[b], b, err);
    }
    return s;
}

cflow_status tensors_bind(model_weights *m, cflow_error *err) {
    const cflow_header *h = &m->header;
    uint32_t *first_layer = memory_zeroed(h->n_blocks, sizeof *first_layer);
    m->blocks = memory_zeroed(h->n_blocks, sizeof *m->blocks);
    m->first_record = memory_zeroed((size_t)h->n_blocks + 1, sizeof *m->first_record);
    m->expert_data = memory_zeroed(h->n_records, sizeof *m->expert_data);
    cflow_status s;
    if (first_layer && m->blocks && m->first_record && m->expert_data)
        s = bind(m, first_layer, err);
    else
        s = fail(err, CFLOW_ENOMEM, "no memory for the tables of %u blocks and %u records",
                 h->n_blocks, h->n_records);
    memory_free(first_layer);
    return s;
}
