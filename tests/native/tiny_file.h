/* A small valid model file built in memory, with index arithmetic of its own (docs/format.md).
 *
 * Two layers: 0 dense, 1 mixture of experts with a shared one. Weights are small integers times a
 * power of two, exact in every encoding used. */
#ifndef CFLOW_TINY_FILE_H
#define CFLOW_TINY_FILE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cflow.h"

enum {
    TINY_D = 64,
    TINY_VOCAB = 40,
    TINY_TOKENS = 38,
    TINY_HEADS = 4,
    TINY_KV_HEADS = 2,
    TINY_HEAD_DIM = 16,
    TINY_D_FF = 160, /* five stripes of 32, gate and up interleaved */
    TINY_EXPERTS = 4,
    TINY_D_EXPERT = 96,
    TINY_D_SHARED = 32,
    TINY_MAX_LAYERS = 10,
    TINY_MAX_TENSORS = 160,
    TINY_PAGE = 4096,
    TINY_RUN = 1 << 20,
    TINY_BANK = 20 << 20 /* room; the last tensor is put past 1 MiB, so that there are two runs */
};

typedef struct {
    cflow_header header;
    cflow_layer layers[TINY_MAX_LAYERS];
    cflow_tensor tensors[TINY_MAX_TENSORS];
    cflow_record records[TINY_EXPERTS];
    uint8_t *resident, *experts; /* the banks, TINY_BANK each */
    uint64_t resident_bytes, record_bytes;
} tiny;

/* The value at a row and column of a tensor, in units of its scale; -8 .. 7. */
static inline int tiny_code(uint32_t role, uint32_t expert, uint32_t row, uint32_t col) {
    return (int)((role * 31 + expert * 17 + row * 7 + col * 3 + row * col) % 16) - 8;
}
static inline float tiny_value(const cflow_tensor *t, uint32_t expert, uint32_t row, uint32_t col) {
    const float scale = t->encoding == CFLOW_Q4_0 ? 0.5f : t->encoding == CFLOW_Q8_0 ? 0.25f : 1.0f;
    return scale * (float)tiny_code(t->role, expert, row, col);
}

static inline void tiny_put(uint8_t *at, const void *value, size_t n) {
    memcpy(at, value, n);
}

/* Writes one value of a stripe of `rows` rows, and its block's scale. */
static inline void tiny_set(const cflow_tensor *t, uint8_t *stripe, uint32_t rows, uint32_t r,
                            uint32_t col, int code) {
    static const uint16_t half = 0x3800, quarter = 0x3400; /* as f16 */
    const uint32_t groups = rows / 16, g = r / 16, c = col % 32, b = col / 32;
    uint8_t *block;
    switch (t->encoding) {
    case CFLOW_Q4_0:
        block = stripe + b * groups * 288;
        block[g * 256 + c / 8 * 64 + r % 16 * 4 + c % 4] |=
            (uint8_t)((code + 8) << (c % 8 < 4 ? 0 : 4));
        tiny_put(block + groups * 256 + r * 2, &half, 2);
        break;
    case CFLOW_Q8_0:
        block = stripe + b * groups * 544;
        block[g * 512 + c / 4 * 64 + r % 16 * 4 + c % 4] = (uint8_t)(code + 128);
        tiny_put(block + groups * 512 + r * 2, &quarter, 2);
        break;
    default: { /* f32 */
        const float value = (float)code;
        tiny_put(stripe + b * groups * 2048 + g * 2048 + (c * 16 + r % 16) * 4, &value, 4);
    }
    }
}

static inline uint64_t tiny_stripe_bytes(uint32_t encoding, uint32_t rows, uint32_t n_cols) {
    const uint64_t group = encoding == CFLOW_Q4_0 ? 288 : encoding == CFLOW_Q8_0 ? 544 : 2048;
    return group * (rows / 16) * ((n_cols + 31) / 32);
}

static inline void tiny_fill(const cflow_tensor *t, uint8_t *bank, uint32_t expert) {
    for (uint32_t row = 0; row < t->n_rows; row++)
        for (uint32_t col = 0; col < t->n_cols; col++) {
            const int code = tiny_code(t->role, expert, row, col);
            const float value = (float)code;
            if (t->stripe_rows)
                tiny_set(t, bank + t->offset + row / t->stripe_rows * t->stripe_stride,
                         t->stripe_rows, row % t->stripe_rows, col, code);
            else
                tiny_put(bank + t->offset + 4 * col, &value, 4);
        }
}

/* Adds a tensor at `offset`; stride 0: it stands alone. Returns the byte behind it, 64-aligned. */
static inline uint64_t tiny_add(tiny *f, uint32_t role, uint32_t block, uint32_t encoding,
                                uint32_t n_rows, uint32_t n_cols, uint32_t stripe_rows,
                                uint64_t offset, uint64_t stride) {
    const uint64_t bytes =
        stripe_rows ? tiny_stripe_bytes(encoding, stripe_rows, n_cols) : 4 * n_cols;
    cflow_tensor *t = &f->tensors[f->header.n_tensors++];
    *t = (cflow_tensor){.role = role,
                        .block = block,
                        .encoding = encoding,
                        .n_rows = n_rows,
                        .n_cols = n_cols,
                        .stripe_rows = stripe_rows,
                        .offset = offset,
                        .stripe_stride = stride ? stride : bytes};
    const uint64_t n = stripe_rows ? (n_rows + stripe_rows - 1) / stripe_rows : 1;
    if (role >= CFLOW_EXPERT_GATE)
        for (uint32_t e = 0; e < TINY_EXPERTS; e++)
            tiny_fill(t, f->experts + f->records[e].offset, e);
    else
        tiny_fill(t, f->resident, 0);
    return (offset + (n - 1) * t->stripe_stride + bytes + 63) / 64 * 64;
}

static inline void tiny_matrix(tiny *f, uint32_t role, uint32_t block, uint32_t encoding,
                               uint32_t n_rows, uint32_t n_cols, uint32_t stripe_rows) {
    f->resident_bytes =
        tiny_add(f, role, block, encoding, n_rows, n_cols, stripe_rows, f->resident_bytes, 0);
}

static inline void tiny_vector(tiny *f, uint32_t role, uint32_t block, uint32_t n) {
    tiny_matrix(f, role, block, CFLOW_F32, 1, n, 0);
}

static inline cflow_layer tiny_layer(uint32_t block) {
    return (cflow_layer){.block = block,
                         .n_heads = TINY_HEADS,
                         .n_kv_heads = TINY_KV_HEADS,
                         .head_dim = TINY_HEAD_DIM,
                         .attention_scale = 0.25f,
                         .rope_kind = CFLOW_ROPE_HALF,
                         .rope_dim = TINY_HEAD_DIM,
                         .rope_base = 10000,
                         .norm_eps = 1e-5f,
                         .norms_shared = 1,
                         .residual_scale = 1};
}

static inline void tiny_attention(tiny *f, uint32_t block) {
    const uint32_t q = TINY_HEADS * TINY_HEAD_DIM, kv = TINY_KV_HEADS * TINY_HEAD_DIM;
    tiny_vector(f, CFLOW_NORM1, block, TINY_D);
    tiny_matrix(f, CFLOW_Q, block, CFLOW_Q8_0, q, TINY_D, 64);
    tiny_matrix(f, CFLOW_K, block, CFLOW_Q8_0, kv, TINY_D, 32);
    tiny_matrix(f, CFLOW_V, block, CFLOW_F32, kv, TINY_D, 32);
    tiny_matrix(f, CFLOW_O, block, CFLOW_Q4_0, TINY_D, q, 64);
    tiny_vector(f, CFLOW_NORM2, block, TINY_D);
}

/* Gate and up interleaved by stripe from `offset`, then down. Returns the byte behind them. */
static inline uint64_t tiny_gated(tiny *f, uint32_t gate, uint32_t block, uint32_t width,
                                  uint32_t stripe_rows, uint64_t offset) {
    const uint64_t one = tiny_stripe_bytes(CFLOW_Q4_0, stripe_rows, TINY_D);
    tiny_add(f, gate, block, CFLOW_Q4_0, width, TINY_D, stripe_rows, offset, 2 * one);
    offset =
        tiny_add(f, gate + 1, block, CFLOW_Q4_0, width, TINY_D, stripe_rows, offset + one, 2 * one);
    return tiny_add(f, gate + 2, block, CFLOW_Q8_0, TINY_D, width, 64, offset, 0);
}

static inline void tiny_experts(tiny *f) {
    const uint64_t gate = tiny_stripe_bytes(CFLOW_Q4_0, 96, TINY_D);
    const uint64_t down = tiny_stripe_bytes(CFLOW_Q8_0, 64, TINY_D_EXPERT);
    f->record_bytes = 2 * gate + down;
    const uint64_t padded = (f->record_bytes + TINY_PAGE - 1) / TINY_PAGE * TINY_PAGE;
    for (uint32_t e = 0; e < TINY_EXPERTS; e++)
        f->records[e] =
            (cflow_record){.block = 1, .expert = e, .offset = e * padded, .bytes = f->record_bytes};
    f->header.n_records = TINY_EXPERTS;
    tiny_gated(f, CFLOW_EXPERT_GATE, 1, TINY_D_EXPERT, 96, 0);
}

static inline tiny tiny_open(void) {
    tiny f = {.header = {.magic = {'c', 'f', 'l', 'o', 'w', '\r', '\n', 0x1a},
                         .version = 1,
                         .n_layers = 2,
                         .n_blocks = 2,
                         .d_model = TINY_D,
                         .vocab_size = TINY_VOCAB,
                         .n_tokens = TINY_TOKENS,
                         .context = 128,
                         .embedding_scale = 1,
                         .final_norm_eps = 1e-5f}};
    f.resident = calloc(1, TINY_BANK);
    f.experts = calloc(1, TINY_BANK);
    f.layers[0] = tiny_layer(0);
    f.layers[0].d_ff = TINY_D_FF;
    f.layers[1] = tiny_layer(1);
    f.layers[1].n_experts = TINY_EXPERTS;
    f.layers[1].top_k = 2;
    f.layers[1].d_expert = TINY_D_EXPERT;
    f.layers[1].d_shared = TINY_D_SHARED;
    f.layers[1].shared_gate = 1;
    f.layers[1].expert_scale = 1;
    tiny_matrix(&f, CFLOW_EMBEDDING, CFLOW_MODEL_LEVEL, CFLOW_Q8_0, TINY_VOCAB, TINY_D, 64);
    tiny_attention(&f, 0);
    f.resident_bytes = tiny_gated(&f, CFLOW_GATE, 0, TINY_D_FF, 32, f.resident_bytes);
    tiny_attention(&f, 1);
    tiny_vector(&f, CFLOW_Q_BIAS, 1, TINY_HEADS * TINY_HEAD_DIM);
    tiny_matrix(&f, CFLOW_ROUTER, 1, CFLOW_F32, TINY_EXPERTS, TINY_D, 32);
    f.resident_bytes = tiny_gated(&f, CFLOW_SHARED_GATE, 1, TINY_D_SHARED, 32, f.resident_bytes);
    tiny_matrix(&f, CFLOW_SHARED_SCALE, 1, CFLOW_F32, 1, TINY_D, 32);
    tiny_experts(&f);
    tiny_vector(&f, CFLOW_FINAL_NORM, CFLOW_MODEL_LEVEL, TINY_D);
    f.resident_bytes += TINY_RUN; /* a gap: the head is in the second run */
    tiny_matrix(&f, CFLOW_HEAD, CFLOW_MODEL_LEVEL, CFLOW_Q4_0, TINY_VOCAB, TINY_D, 64);
    return f;
}

/* Dense layers behind the others, in the bank too, more than a run apart. */
static inline void tiny_deepen(tiny *f, uint32_t n_layers) {
    for (uint32_t b = f->header.n_layers; b < n_layers; b++) {
        f->layers[b] = tiny_layer(b);
        f->layers[b].d_ff = TINY_D_FF;
        f->resident_bytes += TINY_RUN;
        tiny_attention(f, b);
        f->resident_bytes += TINY_RUN / 2; /* so that its matrices are in several runs */
        f->resident_bytes = tiny_gated(f, CFLOW_GATE, b, TINY_D_FF, 32, f->resident_bytes);
    }
    f->header.n_layers = f->header.n_blocks = n_layers;
}

static inline void tiny_close(tiny *f) {
    free(f->resident);
    free(f->experts);
}

static inline const cflow_tensor *tiny_tensor(const tiny *f, uint32_t role, uint32_t block) {
    for (uint32_t i = 0; i < f->header.n_tensors; i++)
        if (f->tensors[i].role == role && f->tensors[i].block == block) return &f->tensors[i];
    return NULL;
}

/* ---- the bytes of the file ---- */

typedef struct {
    uint8_t *data;
    uint64_t bytes;
} tiny_image;

static inline cflow_header *tiny_header(const tiny_image *image) {
    return (cflow_header *)(void *)image->data;
}

static inline void *tiny_section(const tiny_image *image, uint32_t section) {
    return image->data + tiny_header(image)->sections[section].offset;
}

/* Recomputes the checksums of the small sections and the header after a change. */
static inline void tiny_seal(const tiny_image *image) {
    cflow_header *h = tiny_header(image);
    for (uint32_t i = 0; i <= CFLOW_SECTION_RUN_CRCS; i++) {
        cflow_section *s = &h->sections[i];
        if (s->offset <= image->bytes && s->bytes <= image->bytes - s->offset)
            s->crc = cflow_crc32c(0, image->data + s->offset, s->bytes);
    }
    h->crc = cflow_crc32c(0, h, offsetof(cflow_header, crc));
}

static inline uint64_t tiny_token_bytes(uint8_t *out) {
    const uint32_t n = TINY_TOKENS;
    tiny_put(out, &n, 4);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t end = 2 * (i / 2 + 1); /* every other token is empty */
        tiny_put(out + 4 + 4 * i, &end, 4);
    }
    memset(out + 4 + 4 * n, 0, n);
    memset(out + 4 + 5 * n, 'x', n);
    return 4 + 6 * n;
}

static inline void tiny_checksum_banks(tiny *f, uint32_t *crcs) {
    for (uint64_t at = 0; at < f->resident_bytes; at += TINY_RUN) {
        const uint64_t rest = f->resident_bytes - at;
        *crcs++ = cflow_crc32c(0, f->resident + at, rest < TINY_RUN ? rest : TINY_RUN);
    }
    const uint64_t padded = f->records[1].offset;
    for (uint32_t e = 0; e < TINY_EXPERTS; e++)
        f->records[e].crc = cflow_crc32c(0, f->experts + f->records[e].offset, padded);
}

/* The bytes of the whole file. The caller frees image.data. */
static inline tiny_image tiny_write(tiny *f) {
    static const char metadata[] = "{\"name\": \"tiny\", \"eos_ids\": []}", tokenizer[] = "{}";
    uint8_t tokens[1024];
    uint32_t crcs[TINY_BANK / TINY_RUN];
    tiny_checksum_banks(f, crcs);
    const struct {
        const void *data;
        uint64_t bytes;
    } parts[] = {{f->layers, f->header.n_layers * sizeof *f->layers},
                 {f->tensors, f->header.n_tensors * sizeof *f->tensors},
                 {f->records, sizeof f->records},
                 {metadata, sizeof metadata - 1},
                 {tokenizer, sizeof tokenizer - 1},
                 {tokens, tiny_token_bytes(tokens)},
                 {crcs, (f->resident_bytes + TINY_RUN - 1) / TINY_RUN * 4},
                 {f->resident, f->resident_bytes},
                 {f->experts, TINY_EXPERTS * f->records[1].offset}};
    uint64_t at = TINY_PAGE;
    for (uint32_t i = 0; i <= CFLOW_SECTION_EXPERT_BANK; i++) {
        f->header.sections[i] = (cflow_section){.offset = at, .bytes = parts[i].bytes};
        at += (parts[i].bytes + TINY_PAGE - 1) / TINY_PAGE * TINY_PAGE;
    }
    f->header.file_bytes = at;
    tiny_image image = {.data = calloc(1, at), .bytes = at};
    tiny_put(image.data, &f->header, sizeof f->header);
    for (uint32_t i = 0; i <= CFLOW_SECTION_EXPERT_BANK; i++)
        tiny_put(tiny_section(&image, i), parts[i].data, parts[i].bytes);
    tiny_seal(&image);
    return image;
}

#endif
