/* Opening model files: valid ones give back what was written, all others are rejected with the
 * reason. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "expect.h"
#include "model_open.h"
#include "temporary.h"
#include "tiny_file.h"

typedef unsigned long long ull;

static char path[64];

static void write_bytes(const void *data, uint64_t offset, uint64_t bytes) {
    const int fd = open(path, O_WRONLY);
    CHECK(pwrite(fd, data, bytes, (off_t)offset) == (ssize_t)bytes, "cannot write %s", path);
    close(fd);
}

static void write_image(const tiny_image *image) {
    CHECK(truncate(path, 0) == 0, "cannot truncate %s", path);
    write_bytes(image->data, 0, image->bytes);
}

static cflow_status try_open(cflow_model **model, cflow_model_options options, cflow_error *err) {
    if (!options.path) options.path = path;
    if (!options.n_threads) options.n_threads = 1;
    err->text[0] = 0;
    return cflow_model_open(model, &options, err);
}

/* Opening must give status `want` and, in its message, `text`. */
static void refused(cflow_model_options options, cflow_status want, const char *text,
                    const char *what) {
    cflow_model *model;
    cflow_error err;
    const cflow_status got = try_open(&model, options, &err);
    CHECK(got == want, "%s: status %d, want %d (%s)", what, got, want, err.text);
    CHECK(got == CFLOW_OK || model == NULL, "%s: a model is left", what);
    CHECK(strstr(err.text, text), "%s: \"%s\" lacks \"%s\"", what, err.text, text);
    cflow_model_close(model);
}

/* ---- good files ---- */

static void check_rows(const tiny *f, const cflow_model *m) {
    float out[TINY_D_FF * TINY_D_FF];
    cflow_error err;
    for (uint32_t i = 0; i < f->header.n_tensors; i++) {
        const cflow_tensor *t = &f->tensors[i];
        const uint32_t n_experts = t->role >= CFLOW_EXPERT_GATE ? TINY_EXPERTS : 1;
        for (uint32_t e = 0; e < n_experts; e++) {
            CHECK(!cflow_model_rows(m, i, e, 0, t->n_rows, out, &err), "%s", err.text);
            for (uint32_t row = 0; row < t->n_rows; row++)
                for (uint32_t col = 0; col < t->n_cols; col++) {
                    const float want = tiny_value(t, e, row, col);
                    const float got = out[row * t->n_cols + col];
                    CHECK(got == want, "tensor %u expert %u (%u, %u): %g, want %g", i, e, row, col,
                          (double)got, (double)want);
                    if (got != want) return;
                }
        }
    }
}

static void gives_back_what_was_written(const tiny *f) {
    for (int as_f32 = 0; as_f32 <= 1; as_f32++)
        for (int n_threads = 1; n_threads <= 5; n_threads += 2) {
            cflow_model *m;
            cflow_error err;
            cflow_progress progress = {0};
            const cflow_model_options options = {
                .n_threads = n_threads, .as_f32 = as_f32, .progress = &progress};
            CHECK(try_open(&m, options, &err) == CFLOW_OK, "%s", err.text);
            if (!m) return;
            check_rows(f, m);
            CHECK(progress.total_bytes == f->resident_bytes + TINY_EXPERTS * f->records[1].offset,
                  "%llu bytes in all", (ull)progress.total_bytes);
            CHECK(progress.done_bytes == progress.total_bytes, "%llu bytes done",
                  (ull)progress.done_bytes);
            cflow_model_close(m);
        }
}

static void thread_counts_give_equal_memory(void) {
    cflow_model *one, *five;
    cflow_error err;
    CHECK(try_open(&one, (cflow_model_options){.n_threads = 1}, &err) == CFLOW_OK, "%s", err.text);
    CHECK(try_open(&five, (cflow_model_options){.n_threads = 5}, &err) == CFLOW_OK, "%s", err.text);
    CHECK(one->weights.memory.used == five->weights.memory.used, "sizes differ");
    CHECK(!memcmp(one->weights.memory.base, five->weights.memory.base, one->weights.memory.used),
          "contents differ");
    cflow_model_close(one);
    cflow_model_close(five);
}

static void tells_about_itself(const tiny *f) {
    cflow_model *m;
    cflow_error err;
    CHECK(try_open(&m, (cflow_model_options){0}, &err) == CFLOW_OK, "%s", err.text);
    uint64_t bytes;
    cflow_memory memory;
    cflow_model_memory(m, &memory);
    CHECK(cflow_model_header(m)->d_model == TINY_D, "header");
    CHECK(cflow_model_layer(m, 1)->n_experts == TINY_EXPERTS, "layer");
    CHECK(!cflow_model_layer(m, 2) && !cflow_model_tensor(m, f->header.n_tensors), "past the end");
    CHECK(!memcmp(cflow_model_tensor(m, 3), &f->tensors[3], sizeof *f->tensors), "tensor");
    const char *tokenizer = cflow_model_section(m, CFLOW_SECTION_TOKENIZER, &bytes);
    CHECK(bytes == 2 && !memcmp(tokenizer, "{}", 2), "tokenizer");
    CHECK(!cflow_model_section(m, CFLOW_SECTION_RESIDENT, &bytes) && !bytes, "banks are not given");
    CHECK(!cflow_model_section(m, 1000, &bytes) && !bytes, "section 1000");
    CHECK(memory.resident_bytes >= f->resident_bytes && memory.load_s > 0, "memory");
    CHECK(memory.huge_bytes <= memory.resident_bytes, "huge pages");
    float out[TINY_D];
    CHECK(cflow_model_rows(m, 0, 0, TINY_VOCAB, 1, out, &err) == CFLOW_EINVAL, "row past the end");
    CHECK(cflow_model_rows(m, 0, 0, 1, UINT32_MAX, out, &err) == CFLOW_EINVAL, "rows that wrap");
    CHECK(cflow_model_rows(m, 1000, 0, 0, 1, out, &err) == CFLOW_EINVAL, "tensor 1000");
    const uint32_t gate = (uint32_t)(tiny_tensor(f, CFLOW_EXPERT_GATE, 1) - f->tensors);
    CHECK(cflow_model_rows(m, gate, TINY_EXPERTS, 0, 1, out, &err) == CFLOW_EINVAL,
          "expert 4 of 4");
    cflow_model_close(m);
}

/* Block 0 dense, block 1 experts with a gated shared one: the scale is read with the router, the
 * shared expert before the chosen ones. */
static void reading_order_follows_the_plan(void) {
    static const uint32_t roles[] = {CFLOW_EMBEDDING,
                                     CFLOW_NORM1,
                                     CFLOW_Q,
                                     CFLOW_K,
                                     CFLOW_V,
                                     CFLOW_O,
                                     CFLOW_NORM2,
                                     CFLOW_GATE,
                                     CFLOW_UP,
                                     CFLOW_DOWN,
                                     CFLOW_NORM1,
                                     CFLOW_Q,
                                     CFLOW_K,
                                     CFLOW_V,
                                     CFLOW_Q_BIAS,
                                     CFLOW_O,
                                     CFLOW_NORM2,
                                     CFLOW_ROUTER,
                                     CFLOW_SHARED_SCALE,
                                     CFLOW_SHARED_GATE,
                                     CFLOW_SHARED_UP,
                                     CFLOW_SHARED_DOWN,
                                     CFLOW_EXPERT_GATE,
                                     CFLOW_EXPERT_UP,
                                     CFLOW_EXPERT_DOWN,
                                     CFLOW_FINAL_NORM,
                                     CFLOW_HEAD};
    enum { N = sizeof roles / sizeof *roles, FIRST_OF_BLOCK_1 = 10 };
    cflow_model *m;
    cflow_error err;
    CHECK(!try_open(&m, (cflow_model_options){.header_only = 1}, &err), "%s", err.text);
    if (!m) return;
    CHECK(cflow_model_header(m)->n_tensors == N, "%u tensors", cflow_model_header(m)->n_tensors);
    uint32_t order[TINY_MAX_TENSORS];
    cflow_model_reading_order(m, order);
    for (uint32_t i = 0; i < N; i++) {
        const int is_global = i == 0 || i >= N - 2;
        const uint32_t block = is_global ? CFLOW_MODEL_LEVEL : i >= FIRST_OF_BLOCK_1;
        const cflow_tensor *t = cflow_model_tensor(m, order[i]);
        CHECK(t && t->role == roles[i] && t->block == block,
              "place %u: tensor %u, want role %u of block %u", i, order[i], roles[i], block);
    }
    cflow_model_close(m);
}

static void headers_alone_need_no_banks(const tiny_image *image) {
    const uint64_t end = tiny_header(image)->sections[CFLOW_SECTION_RESIDENT].offset;
    CHECK(truncate(path, (off_t)end) == 0, "truncate");
    for (int as_f32 = 0; as_f32 <= 1; as_f32++) {
        cflow_model *m;
        cflow_error err;
        const cflow_model_options options = {.header_only = 1, .as_f32 = as_f32};
        CHECK(try_open(&m, options, &err) == CFLOW_OK, "%s", err.text);
        if (!m) continue;
        cflow_plan_info info;
        cflow_model_plan(m, &info);
        CHECK(info.n_stages > 0 && info.bytes_per_token > 0, "no plan");
        float out[TINY_D];
        CHECK(cflow_model_rows(m, 0, 0, 0, 1, out, &err) == CFLOW_EINVAL, "rows without weights");
        cflow_model_close(m);
    }
    refused((cflow_model_options){0}, CFLOW_EFORMAT, "truncated", "no banks");
    write_image(image);
}

static void reads_without_direct_io(const tiny *f, const tiny_image *image) {
    char usual[sizeof path];
    memcpy(usual, path, sizeof path);
    snprintf(path, sizeof path, "/dev/shm/cflow-test-%d", (int)getpid());
    const int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (fd >= 0) {
        close(fd);
        write_image(image);
        gives_back_what_was_written(f);
        unlink(path);
    }
    memcpy(path, usual, sizeof path);
}

/* ---- bad calls and things that are no model ---- */

static void refuses_bad_calls(void) {
    cflow_progress cancelled = {.cancel = 1};
    refused((cflow_model_options){.n_threads = -1}, CFLOW_EINVAL, "-1", "no threads");
    refused((cflow_model_options){.n_threads = 100000}, CFLOW_EINVAL, "100000", "many threads");
    refused((cflow_model_options){.path = "/no/such"}, CFLOW_EIO, "/no/such: No such file", "path");
    refused((cflow_model_options){.path = "/tmp"}, CFLOW_EFORMAT, "regular file", "folder");
    refused((cflow_model_options){.path = "/dev/zero"}, CFLOW_EFORMAT, "regular file", "device");
    refused((cflow_model_options){.progress = &cancelled}, CFLOW_ECANCELLED, "cancelled", "cancel");
}

/* ---- damaged files ---- */

static void cut_at(uint64_t bytes, const tiny_image *image) {
    char what[64];
    if (bytes >= image->bytes) return;
    CHECK(truncate(path, (off_t)bytes) == 0, "truncate");
    snprintf(what, sizeof what, "cut to %llu bytes", (ull)bytes);
    char text[128];
    snprintf(text, sizeof text, "truncated: %llu bytes, its header", (ull)bytes);
    refused((cflow_model_options){0}, CFLOW_EFORMAT, text, what);
}

static void truncated_files_are_rejected(const tiny_image *image) {
    const uint64_t ends[] = {0, 1, 8, TINY_PAGE - 1, image->bytes - 1};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        write_image(image);
        cut_at(ends[i], image);
    }
    write_image(image);
    for (uint32_t i = CFLOW_N_SECTIONS - 1; i-- > 0;) { /* backwards, as each cut removes more */
        const cflow_section *s = &tiny_header(image)->sections[i];
        const uint64_t end = s->offset + s->bytes;
        for (uint64_t at = end + 1; at + 2 > end; at--) cut_at(at, image);
        for (uint64_t at = s->offset + 1; at + 2 > s->offset; at--) cut_at(at, image);
    }
    write_image(image);
    write_bytes("x", image->bytes, 1);
    refused((cflow_model_options){0}, CFLOW_EFORMAT, "its header says", "one byte more");
    write_image(image);
}

static void flip(const tiny_image *image, uint64_t at, const char *text, int header_only) {
    char what[64];
    const uint8_t flipped = image->data[at] ^ 1;
    write_bytes(&flipped, at, 1);
    snprintf(what, sizeof what, "byte %llu flipped", (ull)at);
    cflow_model *model;
    cflow_error err;
    const cflow_status got =
        try_open(&model, (cflow_model_options){.header_only = header_only, .n_threads = 2}, &err);
    CHECK(got != CFLOW_OK && !model, "%s: opened", what);
    CHECK(strstr(err.text, text), "%s: \"%s\" lacks \"%s\"", what, err.text, text);
    cflow_model_close(model);
    write_bytes(&image->data[at], at, 1);
}

static void every_flipped_byte_is_found(const tiny *f, const tiny_image *image) {
    for (uint64_t at = 0; at < TINY_PAGE; at++)
        flip(image, at, at < 8 ? "magic" : at < 12 ? "version" : "header: checksum", 1);
    for (uint32_t i = 0; i <= CFLOW_SECTION_RUN_CRCS; i++) {
        const cflow_section *s = &tiny_header(image)->sections[i];
        for (uint64_t at = 0; at < s->bytes; at++) flip(image, s->offset + at, "checksum", 1);
    }
    const cflow_section *resident = &tiny_header(image)->sections[CFLOW_SECTION_RESIDENT];
    const cflow_section *experts = &tiny_header(image)->sections[CFLOW_SECTION_EXPERT_BANK];
    for (uint64_t at = 0; at < resident->bytes; at += 6007)
        flip(image, resident->offset + at,
             at < TINY_RUN ? "resident bank, run 0 (embedding)" : "resident bank, run 1 (", 0);
    flip(image, resident->offset + resident->bytes - 1, "run 1 (head)", 0);
    for (uint32_t e = 0; e < TINY_EXPERTS; e++) {
        char text[64];
        snprintf(text, sizeof text, "expert bank, block 1 expert %u: checksum", e);
        const uint64_t at = experts->offset + f->records[e].offset;
        flip(image, at, text, 0);
        flip(image, at + f->records[1].offset - 1, text, 0); /* the last byte of the padding */
    }
}

/* ---- lies: wrong numbers with right checksums ---- */

typedef struct {
    const char *what, *text; /* text: in the refusal */
    uint32_t section;        /* HEADER, or a section whose record `index` is changed */
    uint32_t index;          /* of a tensor: its role, in block 1 or the model's */
    size_t at, size;
    uint64_t value;
} lie;

enum { HEADER = 1000 };
#define SIZE_OF(type, field) sizeof(((type *)0)->field)
#define IN_HEADER(field, value, text)                                                              \
    {"header " #field,                                                                             \
     text,                                                                                         \
     HEADER,                                                                                       \
     0,                                                                                            \
     offsetof(cflow_header, field),                                                                \
     SIZE_OF(cflow_header, field),                                                                 \
     value}
#define IN_SECTION(i, field, value, text)                                                          \
    {"section " #i " " #field,                                                                     \
     text,                                                                                         \
     HEADER,                                                                                       \
     0,                                                                                            \
     offsetof(cflow_header, sections) + i * sizeof(cflow_section) +                                \
         offsetof(cflow_section, field),                                                           \
     SIZE_OF(cflow_section, field),                                                                \
     value}
#define IN_LAYER(i, field, value, text)                                                            \
    {"layer " #i " " #field,      text, CFLOW_SECTION_LAYERS, i, offsetof(cflow_layer, field),     \
     SIZE_OF(cflow_layer, field), value}
#define IN_TENSOR(role, field, value, text)                                                        \
    {                                                                                              \
        "tensor " #role " " #field,                                                                \
        text,                                                                                      \
        CFLOW_SECTION_TENSORS,                                                                     \
        role,                                                                                      \
        offsetof(cflow_tensor, field),                                                             \
        SIZE_OF(cflow_tensor, field),                                                              \
        value}
#define IN_RECORD(i, field, value, text)                                                           \
    {"record " #i " " #field,      text, CFLOW_SECTION_EXPERTS, i, offsetof(cflow_record, field),  \
     SIZE_OF(cflow_record, field), value}

#define NAN_BITS 0x7fc00000
#define INF_BITS 0x7f800000
#define MINUS_ONE_BITS 0xbf800000

static const lie lies[] = {
    IN_HEADER(version, 2, "file version 2"),
    IN_HEADER(order, 2, "order is 2"),
    IN_HEADER(file_bytes, UINT64_MAX, "file_bytes is 18446744073709551615"),
    IN_HEADER(file_bytes, 1ull << 50, "truncated"),
    IN_HEADER(file_bytes, 4096, "exceed the file's 4096"),
    IN_HEADER(n_layers, 0, "n_layers is 0"),
    IN_HEADER(n_layers, UINT32_MAX, "n_layers is 4294967295"),
    IN_HEADER(n_layers, 3, "its layers take 576"),
    IN_HEADER(n_blocks, 3, "n_blocks 3 exceeds"),
    IN_HEADER(n_blocks, 1, "layer 1: block is 1, but there are 1"),
    IN_HEADER(d_model, 0, "d_model is 0"),
    IN_HEADER(d_model, UINT32_MAX, "d_model is 4294967295"),
    IN_HEADER(d_model, 96, "tensor embedding: 40 x 64, but the layers need 40 x 96"),
    IN_HEADER(vocab_size, UINT32_MAX, "vocab_size is"),
    IN_HEADER(vocab_size, 37, "n_tokens 38 exceeds vocab_size 37"),
    IN_HEADER(n_tokens, 37, "token bytes: 38 tokens"),
    IN_HEADER(context, 0, "context is 0"),
    IN_HEADER(n_tensors, UINT32_MAX, "n_tensors is"),
    IN_HEADER(n_tensors, 5, "its tensors take 240"),
    IN_HEADER(n_records, UINT32_MAX, "n_records is"),
    IN_HEADER(tied, 1, "tensor head: no layer uses it"),
    IN_HEADER(tied, 2, "tied is 2"),
    IN_HEADER(embedding_scale, NAN_BITS, "embedding_scale is nan"),
    IN_HEADER(final_norm_eps, INF_BITS, "final_norm_eps is inf"),
    IN_HEADER(final_norm_offset, NAN_BITS, "final_norm_offset is nan"),
    IN_HEADER(final_norm_kind, 2, "final_norm_kind is 2"),
    IN_HEADER(logit_scale, MINUS_ONE_BITS, "logit_scale is -1"),
    IN_HEADER(logit_cap, INF_BITS, "logit_cap is inf"),
    IN_HEADER(reserved[7], 1, "reserved byte"),
    IN_SECTION(CFLOW_SECTION_LAYERS, offset, 0, "overlaps the header"),
    IN_SECTION(CFLOW_SECTION_TENSORS, offset, 4097, "not a multiple of 4096"),
    IN_SECTION(CFLOW_SECTION_TENSORS, offset, 4096, "overlap"),
    IN_SECTION(CFLOW_SECTION_METADATA, offset, UINT64_MAX - 4095, "exceed the file's"),
    IN_SECTION(CFLOW_SECTION_METADATA, bytes, UINT64_MAX, "exceed the file's"),
    IN_SECTION(CFLOW_SECTION_METADATA, bytes, 0, "metadata is empty"),
    IN_SECTION(CFLOW_SECTION_METADATA, reserved, 1, "reserved byte"),
    IN_SECTION(CFLOW_SECTION_EXPERTS, bytes, 0, "its records take 128"),
    IN_SECTION(CFLOW_SECTION_TOKEN_BYTES, bytes, 0, "token bytes: 0 tokens"),
    IN_SECTION(CFLOW_SECTION_TOKEN_BYTES, bytes, 193, "38 tokens take 194"),
    IN_SECTION(CFLOW_SECTION_TOKEN_BYTES, bytes, 231, "token 36 ends at 38"),
    IN_SECTION(CFLOW_SECTION_TOKEN_BYTES, bytes, 233, "last token ends at 38, but there are 39"),
    IN_SECTION(CFLOW_SECTION_RUN_CRCS, bytes, 4, "checksums take 8"),
    IN_SECTION(CFLOW_SECTION_RESIDENT, bytes, UINT64_MAX - 4096, "exceed the file's"),
    IN_SECTION(CFLOW_SECTION_RESIDENT, bytes, 1 << 20, "checksums take 4"),
    IN_SECTION(CFLOW_SECTION_EXPERT_BANK, bytes, 4095, "not a multiple of 4096"),
    IN_SECTION(CFLOW_SECTION_EXPERT_BANK, bytes, 4096, "block 1 expert 0"),
    IN_SECTION(9, bytes, 4096, "section spare overlaps the header"),
    IN_LAYER(0, block, 7, "layer 0: block is 7, but there are 2"),
    IN_LAYER(0, block, 1, "share block 1"),
    IN_LAYER(1, n_heads, 0, "n_heads is 0"),
    IN_LAYER(1, n_heads, 1 << 20, "wider than"),
    IN_LAYER(1, n_heads, 8, "tensor block 1 q: 64 x 64, but the layers need 128 x 64"),
    IN_LAYER(1, n_kv_heads, 3, "multiple of n_kv_heads, 3"),
    IN_LAYER(1, n_kv_heads, 0, "n_kv_heads is 0"),
    IN_LAYER(1, head_dim, 0, "head_dim is 0"),
    IN_LAYER(1, head_dim, 1025, "head_dim is 1025"),
    IN_LAYER(1, qk_norm, 4, "qk_norm is 4"),
    IN_LAYER(1, qk_norm, CFLOW_QK_NORM_HEAD, "tensor block 1 q_norm is missing: 1 x 16"),
    IN_LAYER(1, v_norm, 2, "v_norm is 2"),
    IN_LAYER(1, attention_scale, 0, "attention_scale is 0"),
    IN_LAYER(1, rope_kind, 3, "rope_kind is 3"),
    IN_LAYER(1, rope_dim, 15, "rope_dim is 15"),
    IN_LAYER(1, rope_dim, 18, "rope_dim is 18"),
    IN_LAYER(1, rope_dim, 0, "rope_dim is 0"),
    IN_LAYER(1, rope_base, NAN_BITS, "rope_base is nan"),
    IN_LAYER(1, rope_scaling, CFLOW_ROPE_LINEAR, "rope_factor is 0"),
    IN_LAYER(1, rope_scaling, 3, "rope_scaling is 3"),
    IN_LAYER(0, d_ff, UINT32_MAX, "d_ff is"),
    IN_LAYER(0, d_ff, 0, "tensor block 0 norm2: no layer uses it"),
    IN_LAYER(0, d_shared, 32, "a shared expert but no experts"),
    IN_LAYER(1, activation, 3, "activation is 3"),
    IN_LAYER(1, activation_on_up, 2, "activation_on_up is 2"),
    IN_LAYER(1, n_experts, UINT32_MAX, "n_experts is"),
    IN_LAYER(1, n_experts, 5, "need 5 expert records, but the file has 4"),
    IN_LAYER(1, top_k, 5, "top_k is 5, but there are 4"),
    IN_LAYER(1, top_k, 0, "top_k is 0"),
    IN_LAYER(1, renormalise, 2, "renormalise is 2"),
    IN_LAYER(1, expert_scale, MINUS_ONE_BITS, "expert_scale is -1"),
    IN_LAYER(1, d_expert, 0, "d_expert is 0"),
    IN_LAYER(1, d_shared, 0, "no shared expert"),
    IN_LAYER(1, shared_gate, 2, "shared_gate is 2"),
    IN_LAYER(1, norm_eps, NAN_BITS, "norm_eps is nan"),
    IN_LAYER(1, norm_offset, NAN_BITS, "norm_offset is nan"),
    IN_LAYER(1, norms_shared, 0, "tensor block 1 norm2: no layer uses it"),
    IN_LAYER(1, dense_source, 3, "dense_source is 3"),
    IN_LAYER(1, expert_anchor, CFLOW_X_IN_PREVIOUS, "expert_anchor is 2"),
    IN_LAYER(1, expert_delay, UINT32_MAX, "expert_delay is"),
    IN_LAYER(1, residual_scale, 0, "residual_scale is 0"),
    IN_LAYER(1, norm_kind, 2, "norm_kind is 2"),
    IN_LAYER(1, norm_place, 3, "norm_place is 3"),
    IN_LAYER(1, norm_place, CFLOW_NORM_AROUND, "norm_place is 2; with experts it must be 0"),
    IN_LAYER(0, norm_place, CFLOW_NORM_AROUND, "tensor block 0 post_norm1 is missing: 1 x 64"),
    IN_LAYER(0, norm_place, CFLOW_NORM_AFTER, "tensor block 0 norm1: no layer uses it"),
    IN_LAYER(0, ungated, 2, "ungated is 2"),
    IN_LAYER(0, ungated, 1, "tensor block 0 gate: no layer uses it"),
    IN_LAYER(1, score_cap, NAN_BITS, "score_cap is nan"),
    IN_LAYER(1, rope_gain, MINUS_ONE_BITS, "rope_gain is -1"),
    IN_LAYER(1, query_growth, INF_BITS, "query_growth is inf"),
    IN_LAYER(1, query_growth, 0x3f800000, "query_period is 0; with query_growth"),
    IN_LAYER(1, query_start, UINT32_MAX, "query_start is"),
    IN_LAYER(1, reserved[6], 1, "reserved byte"),
    IN_TENSOR(CFLOW_Q, role, CFLOW_N_ROLES, "role 37 is unknown"),
    IN_TENSOR(CFLOW_Q, role, CFLOW_O, "the file has it twice"),
    IN_TENSOR(CFLOW_Q_BIAS, role, CFLOW_K_BIAS,
              "block 1 k_bias: 1 x 64, but the layers need 1 x 32"),
    IN_TENSOR(CFLOW_Q, block, 2, "there are only 2 blocks"),
    IN_TENSOR(CFLOW_Q, block, CFLOW_MODEL_LEVEL, "tensor q: no layer uses"),
    IN_TENSOR(CFLOW_Q, block, 0, "the file has it twice"),
    IN_TENSOR(CFLOW_Q, encoding, 9, "encoding 9 is unknown"),
    IN_TENSOR(CFLOW_ROUTER, encoding, CFLOW_Q8_0, "must be f32 (0)"),
    IN_TENSOR(CFLOW_NORM1, encoding, CFLOW_F16, "must be f32 (0)"),
    IN_TENSOR(CFLOW_Q, n_rows, UINT32_MAX, "4294967295 x 64"),
    IN_TENSOR(CFLOW_Q, n_cols, 0, "64 x 0"),
    IN_TENSOR(CFLOW_Q, stripe_rows, 0, "stripe_rows is 0"),
    IN_TENSOR(CFLOW_Q, stripe_rows, 128, "stripe_rows is 128"),
    IN_TENSOR(CFLOW_NORM1, stripe_rows, 32, "stripe_rows is 32"),
    IN_TENSOR(CFLOW_Q, offset, 32, "multiples of 64"),
    IN_TENSOR(CFLOW_Q, offset, UINT64_MAX - 63, "exceed their bank's"),
    IN_TENSOR(CFLOW_HEAD, offset, 3 << 20, "exceed their bank's"),
    IN_TENSOR(CFLOW_EXPERT_DOWN, offset, UINT64_MAX - 63, "exceed their record's"),
    IN_TENSOR(CFLOW_EXPERT_UP, offset, 1 << 20, "exceed their record's"),
    IN_TENSOR(CFLOW_Q, reserved, 1, "reserved is 1"),
    IN_RECORD(1, block, 0, "out of order: block 0 expert 1"),
    IN_RECORD(1, expert, 2, "out of order: block 1 expert 2"),
    IN_RECORD(1, offset, 64, "block 1 expert 1"),
    IN_RECORD(1, offset, UINT64_MAX - 4095, "block 1 expert 1"),
    IN_RECORD(1, bytes, UINT64_MAX, "block 1 expert 1"),
    IN_RECORD(1, bytes, 64, "exceed their record's 64 bytes"),
    IN_RECORD(0, bytes, 16385, "records overlap"),
    IN_RECORD(3, reserved, 1, "reserved is 1"),
};

static uint64_t lie_offset(const tiny *f, const tiny_image *image, const lie *l) {
    if (l->section == HEADER) return l->at;
    const uint64_t start = tiny_header(image)->sections[l->section].offset;
    if (l->section == CFLOW_SECTION_LAYERS) return start + l->index * sizeof(cflow_layer) + l->at;
    if (l->section == CFLOW_SECTION_EXPERTS) return start + l->index * sizeof(cflow_record) + l->at;
    const cflow_tensor *t = tiny_tensor(f, l->index, 1);
    if (!t) t = tiny_tensor(f, l->index, CFLOW_MODEL_LEVEL);
    return start + (uint64_t)(t - f->tensors) * sizeof *t + l->at;
}

/* Writes the part of the image before the banks: the only part in which images differ. */
static void write_head(const tiny_image *image) {
    write_bytes(image->data, 0, tiny_header(image)->sections[CFLOW_SECTION_RESIDENT].offset);
}

static tiny_image copy_head(const tiny_image *image) {
    tiny_image copy = {.bytes = tiny_header(image)->sections[CFLOW_SECTION_RESIDENT].offset};
    copy.data = malloc(copy.bytes);
    memcpy(copy.data, image->data, copy.bytes);
    return copy;
}

static void wrong_numbers_are_named(const tiny *f, const tiny_image *image) {
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        const lie *l = &lies[i];
        tiny_image changed = copy_head(image);
        memcpy(changed.data + lie_offset(f, image, l), &l->value, l->size);
        tiny_seal(&changed);
        write_bytes(changed.data, 0, changed.bytes);
        refused((cflow_model_options){0},
                strstr(l->what, "version") ? CFLOW_EUNSUPPORTED : CFLOW_EFORMAT, l->text, l->what);
        free(changed.data);
    }
    write_head(image);
}

/* A stride that wraps 64 bits when multiplied by the stripes before the last. */
static void strides_do_not_wrap(const tiny *f, const tiny_image *image) {
    const uint64_t strides[] = {64, 577, UINT64_MAX - 63, 1ull << 63, 1ull << 62, 1ull << 20};
    const uint64_t index = (uint64_t)(tiny_tensor(f, CFLOW_GATE, 0) - f->tensors);
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        tiny_image changed = copy_head(image);
        ((cflow_tensor *)tiny_section(&changed, CFLOW_SECTION_TENSORS))[index].stripe_stride =
            strides[i];
        tiny_seal(&changed);
        write_bytes(changed.data, 0, changed.bytes);
        refused((cflow_model_options){0}, CFLOW_EFORMAT, "block 0 gate", "stride");
        free(changed.data);
    }
    write_head(image);
}

static void missing_tensors_are_named(const tiny *f, const tiny_image *image) {
    for (uint32_t i = 0; i < f->header.n_tensors; i++) {
        tiny_image changed = copy_head(image);
        cflow_tensor *t = tiny_section(&changed, CFLOW_SECTION_TENSORS);
        cflow_header *h = tiny_header(&changed);
        const int is_optional = t[i].role == CFLOW_Q_BIAS;
        memmove(&t[i], &t[i + 1], (h->n_tensors - i - 1) * sizeof *t);
        h->n_tensors--;
        h->sections[CFLOW_SECTION_TENSORS].bytes -= sizeof *t;
        tiny_seal(&changed);
        write_bytes(changed.data, 0, changed.bytes);
        refused((cflow_model_options){.header_only = 1}, is_optional ? CFLOW_OK : CFLOW_EFORMAT,
                is_optional ? "" : "is missing", "a tensor taken out");
        free(changed.data);
    }
    write_head(image);
}

/* If the model was accepted, its reading order has every tensor once. */
static void order_everything(const cflow_model *m) {
    uint32_t order[TINY_MAX_TENSORS];
    int seen[TINY_MAX_TENSORS] = {0};
    memset(order, 0xff, sizeof order);
    cflow_model_reading_order(m, order);
    for (uint32_t i = 0; i < cflow_model_header(m)->n_tensors; i++)
        CHECK(order[i] < TINY_MAX_TENSORS && !seen[order[i]]++, "place %u: tensor %u", i, order[i]);
}

/* If the model was accepted, reads every weight, so that sanitizers check every bound. */
static void read_everything(const cflow_model *m) {
    const cflow_header *h = cflow_model_header(m);
    float *row = malloc(sizeof *row << 20);
    for (uint32_t i = 0; i < h->n_tensors; i++) {
        const cflow_tensor *t = cflow_model_tensor(m, i);
        for (uint32_t r = 0; r < t->n_rows; r++)
            CHECK(!cflow_model_rows(m, i, 0, r, 1, row, NULL), "tensor %u row %u", i, r);
    }
    free(row);
}

/* The small section that byte `at` belongs to; HEADER, or CFLOW_N_SECTIONS for padding. */
static uint32_t section_at(const tiny_image *image, uint64_t at) {
    if (at < sizeof(cflow_header)) return HEADER;
    for (uint32_t i = 0; i <= CFLOW_SECTION_RUN_CRCS; i++) {
        const cflow_section *s = &tiny_header(image)->sections[i];
        if (at >= s->offset && at - s->offset < s->bytes) return i;
    }
    return CFLOW_N_SECTIONS;
}

static int try_change(const tiny_image *image, uint64_t at, uint8_t mask) {
    const uint32_t section = section_at(image, at);
    const int places_weights = section == CFLOW_SECTION_TENSORS || section == CFLOW_SECTION_EXPERTS;
    tiny_image changed = copy_head(image);
    changed.data[at] ^= mask;
    tiny_seal(&changed);
    write_bytes(changed.data, 0, changed.bytes);
    free(changed.data);
    cflow_model *m;
    cflow_error err;
    const cflow_model_options options = {.header_only = !places_weights,
                                         .as_f32 = (int32_t)(at % 2)};
    const int accepted = try_open(&m, options, &err) == CFLOW_OK;
    CHECK(accepted || (!m && err.text[0]), "byte %llu: refused without a word", (ull)at);
    if (accepted) order_everything(m);
    if (accepted && places_weights) read_everything(m);
    cflow_model_close(m);
    return accepted;
}

/* Every byte before the banks changed three ways, with right checksums: accepted or refused. */
static void no_lie_crashes(const tiny_image *image) {
    const uint64_t end = tiny_header(image)->sections[CFLOW_SECTION_RESIDENT].offset;
    const uint64_t reserved = offsetof(cflow_header, reserved) + 8;
    int n_accepted = 0;
    for (uint64_t at = 0; at < end; at++) {
        if (section_at(image, at) == CFLOW_N_SECTIONS) continue;
        if (at >= reserved && at < sizeof(cflow_header)) continue;
        n_accepted += try_change(image, at, 0x01);
        n_accepted += try_change(image, at, 0x80);
        n_accepted += try_change(image, at, 0xff);
    }
    CHECK(n_accepted > 100, "only %d accepted: nothing behind the checks was tried", n_accepted);
    write_head(image);
}

int main(void) {
    const int fd = temporary_file(path);
    tiny f = tiny_open();
    const tiny_image image = tiny_write(&f);
    write_image(&image);
    gives_back_what_was_written(&f);
    thread_counts_give_equal_memory();
    tells_about_itself(&f);
    reading_order_follows_the_plan();
    headers_alone_need_no_banks(&image);
    reads_without_direct_io(&f, &image);
    refuses_bad_calls();
    truncated_files_are_rejected(&image);
    every_flipped_byte_is_found(&f, &image);
    wrong_numbers_are_named(&f, &image);
    strides_do_not_wrap(&f, &image);
    missing_tensors_are_named(&f, &image);
    no_lie_crashes(&image);
    gives_back_what_was_written(&f); /* the file is as it was */
    close(fd);
    free(image.data);
    tiny_close(&f);
    printf(failed ? "file: failed\n" : "file: ok\n");
    return failed;
}
