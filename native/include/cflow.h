/* cflow: a CPU-first streaming inference engine for language models.
 *
 *     cflow_model *model; cflow_ctx *ctx; cflow_error err;
 *     cflow_model_open(&model, &(cflow_model_options){.path = "x.cflow", .n_threads = 2}, &err);
 *     cflow_ctx_open(&ctx, model, &(cflow_ctx_options){.n_threads = 2, ...}, &err);
 *     cflow_ctx_bind(ctx, 0, blocks, n_blocks, &err);
 *     cflow_ctx_step(ctx, rows, n_rows, row_status, scores, &err);
 *     cflow_ctx_sample(ctx, picks, n_picks, choices, &err);
 *
 * bind gives sequence 0 its KV blocks, step runs one forward pass over any mix of rows, sample
 * draws tokens from the logits that step kept. A row is one token position of one sequence.
 *
 * Errors: a call that can fail returns cflow_status and writes its reason to *err, which the caller
 * owns (NULL is allowed).
 * Ownership: the caller closes the handles that it gets through **, in any order: a model lives
 * until its last context is closed. close(NULL) does nothing. Pointers from accessors are valid as
 * long as their handle. All memory is allocated when a handle is opened.
 * Threads: a model is immutable and may be used from any thread. A context may be used by one
 * thread at a time, except for cflow_ctx_cancel and cflow_ctx_stage_count.
 * The library has no global state, reads no environment variable, prints nothing and never exits.
 *
 * Structs marked "file" are stored in the model file as they are (little-endian, natural alignment,
 * no padding); docs/format.md describes the whole file. binding.py gives cffi everything between
 * the two cffi marks.
 */
#ifndef CFLOW_H
#define CFLOW_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

typedef enum {
    CFLOW_OK = 0,
    CFLOW_EINVAL = -1,       /* wrong argument: out of range, or an instruction set the CPU lacks */
    CFLOW_ENOMEM = -2,       /* an allocation failed */
    CFLOW_EIO = -3,          /* the operating system failed a read, or did not answer in time */
    CFLOW_EFORMAT = -4,      /* the file is truncated, altered or inconsistent */
    CFLOW_EUNSUPPORTED = -5, /* a valid file that this build cannot run */
    CFLOW_ECANCELLED = -6,   /* ended by cflow_ctx_cancel or progress->cancel */
    CFLOW_ENUMERIC = -7      /* a row's logits are not finite */
} cflow_status;

typedef struct {
    char text[512];
} cflow_error;

/* ---- the model file -------------------------------------------------------------------------- */

#define CFLOW_VERSION 1
#define CFLOW_N_SECTIONS 10
#define CFLOW_MODEL_LEVEL 0xffffffff /* cflow_tensor.block of a tensor outside the layers */

/* Order of the weights in the banks: layer by layer, or in the order that cflow_model_reading_order
 * gave when the file was written. Readers use the offsets and do not depend on the order. */
typedef enum { CFLOW_ORDER_LAYER = 0, CFLOW_ORDER_STAGE = 1 } cflow_order;

/* How the values of a matrix are stored. A group is 16 rows. Sizes are the bytes of a group by 32
 * columns, for the k forms of a group by a tile of 256 columns. docs/format.md has the bit layout.
 */
typedef enum {
    CFLOW_F32 = 0,  /* 2048 */
    CFLOW_F16 = 1,  /* 1024 */
    CFLOW_BF16 = 2, /* 1024 */
    CFLOW_Q4_0 = 3, /*  288: d (q - 8) */
    CFLOW_Q4_1 = 4, /*  320: d q + m */
    CFLOW_Q8_0 = 5, /*  544: d (q - 128) */
    CFLOW_Q8_1 = 6, /*  576: d (q - 128) + m */
    CFLOW_Q4_K = 7, /* 2368 a tile: d s q - dmin t; s, t 8-bit unsigned per 32 columns */
    CFLOW_Q6_K = 8, /* 3360 a tile: d s (q - 32); s 8-bit signed per 16 columns */
    CFLOW_N_ENCODINGS = 9
} cflow_encoding;

typedef enum {
    CFLOW_SECTION_LAYERS = 0,      /* cflow_layer[n_layers] */
    CFLOW_SECTION_TENSORS = 1,     /* cflow_tensor[n_tensors] */
    CFLOW_SECTION_EXPERTS = 2,     /* cflow_record[n_records] */
    CFLOW_SECTION_METADATA = 3,    /* JSON, UTF-8 */
    CFLOW_SECTION_TOKENIZER = 4,   /* tokenizer.json, UTF-8; may be empty */
    CFLOW_SECTION_TOKEN_BYTES = 5, /* u32 n; u32 ends[n]; u8 flags[n]; bytes */
    CFLOW_SECTION_RUN_CRCS = 6,    /* u32 CRC-32C per MiB run of the resident bank */
    CFLOW_SECTION_RESIDENT = 7,    /* the resident bank: all tensors except the experts' */
    CFLOW_SECTION_EXPERT_BANK = 8  /* one record for each expert, 4096-aligned */
} cflow_section_id;

typedef struct {     /* file */
    uint64_t offset; /* from the start of the file, a multiple of 4096 */
    uint64_t bytes;
    uint32_t crc; /* CRC-32C of the section; 0 for the banks, which have one per run or record */
    uint32_t reserved;
} cflow_section;

typedef struct {   /* file: the first 4096 bytes */
    char magic[8]; /* "cflow\r\n\x1a" */
    uint32_t version;
    uint32_t order; /* cflow_order */
    uint64_t file_bytes;
    uint32_t n_layers;
    uint32_t n_blocks; /* weight blocks; fewer than n_layers if layers share weights */
    uint32_t d_model;
    uint32_t vocab_size; /* rows of embedding and head */
    uint32_t n_tokens;   /* of the tokenizer, at most vocab_size; higher ids are never sampled */
    uint32_t context;    /* positions the model was trained for */
    uint32_t n_tensors;
    uint32_t n_records;
    uint32_t tied;         /* 1: the head uses the embedding's matrix */
    float embedding_scale; /* multiplies embedding rows; usually 1 */
    float final_norm_eps;
    float final_norm_offset; /* 1: the norm multiplies by (1 + w); 0: by w */
    cflow_section sections[CFLOW_N_SECTIONS];
    uint32_t final_norm_kind; /* cflow_norm_kind */
    float logit_scale;        /* multiplies the logits; 0 means 1 */
    float logit_cap;          /* above 0: a logit x becomes cap * tanh(x / cap) */
    uint8_t reserved[3768];
    uint32_t crc; /* CRC-32C of the first 4092 bytes */
} cflow_header;

typedef enum {
    CFLOW_ROPE_NONE = 0,
    CFLOW_ROPE_HALF = 1,
    CFLOW_ROPE_INTERLEAVED = 2
} cflow_rope_kind;
typedef enum {
    CFLOW_ROPE_PLAIN = 0,
    CFLOW_ROPE_LINEAR = 1,
    CFLOW_ROPE_LLAMA3 = 2
} cflow_rope_scaling;
typedef enum {
    CFLOW_QK_NORM_NONE = 0,
    CFLOW_QK_NORM_HEAD = 1,   /* RMSNorm over each head, weight (head_dim,) */
    CFLOW_QK_NORM_FULL = 2,   /* RMSNorm over the whole projection, weight (n_heads * head_dim,) */
    CFLOW_QK_NORM_ROTATED = 3 /* as HEAD, but after rotary embedding */
} cflow_qk_norm;
typedef enum {
    CFLOW_NORM_RMS = 0,  /* x / sqrt(mean(x^2) + eps) * w */
    CFLOW_NORM_LAYER = 1 /* (x - mean(x)) / sqrt(var(x) + eps) * w (+ bias) */
} cflow_norm_kind;
typedef enum {                        /* where a layer norms, for attention and for the dense FFN */
               CFLOW_NORM_BEFORE = 0, /* the input: norm1, norm2 */
               CFLOW_NORM_AFTER = 1,  /* the output, before it is added: post_norm1, post_norm2 */
               CFLOW_NORM_AROUND = 2  /* both */
} cflow_norm_place;
typedef enum {
    CFLOW_SILU = 0,
    CFLOW_GELU_TANH = 1, /* x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3))) */
    CFLOW_GELU_ERF = 2
} cflow_activation;
typedef enum {
    CFLOW_POST_ATTENTION = 0, /* x_in[l] + attention of l */
    CFLOW_X_IN = 1,           /* x_in[l] */
    CFLOW_X_IN_PREVIOUS = 2   /* x_in[l-1]; for l = 0 the embedding; dense_source only */
} cflow_source;

typedef struct {    /* file: one layer, 192 bytes */
    uint32_t block; /* weight block */
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window;  /* positions attended to; 0: all earlier ones */
    uint32_t qk_norm; /* cflow_qk_norm */
    uint32_t v_norm;  /* 1: RMSNorm over each head of V, no weight */
    float attention_scale;
    uint32_t rope_kind; /* cflow_rope_kind */
    uint32_t rope_dim;  /* leading dimensions of a head that are rotated */
    float rope_base;
    uint32_t rope_scaling; /* cflow_rope_scaling */
    float rope_factor;
    float rope_low_freq;  /* Llama 3: low_freq_factor */
    float rope_high_freq; /* Llama 3: high_freq_factor */
    uint32_t rope_original_context;
    uint32_t d_ff;             /* width of the dense FFN; 0: none */
    uint32_t activation;       /* cflow_activation of the dense FFN and the experts */
    uint32_t activation_on_up; /* 0: act(gate) * up; 1: gate * act(up) */
    uint32_t n_experts;        /* 0: none */
    uint32_t top_k;
    uint32_t renormalise; /* 1: the top_k routing weights are divided by their sum */
    float expert_scale;   /* multiplies the routing weights */
    uint32_t d_expert;
    uint32_t d_shared;    /* width of the shared expert; 0: none */
    uint32_t shared_gate; /* 1: its output is multiplied by sigmoid(w . x) */
    float norm_eps;
    float norm_offset;      /* 1: norms multiply by (1 + w); 0: by w */
    uint32_t norms_shared;  /* 1: experts read norm2; 0: they have a norm3 */
    uint32_t dense_source;  /* cflow_source: input of the dense FFN */
    uint32_t expert_anchor; /* cflow_source: input of router, experts and shared expert */
    uint32_t expert_delay;  /* expert output of layer l is added after layer l + delay */
    float residual_scale;   /* multiplies the output of attention and of the dense FFN */
    uint32_t norm_kind;     /* cflow_norm_kind of norm1, norm2 and norm3 */
    uint32_t norm_place;    /* cflow_norm_place; AFTER and AROUND without experts only */
    uint32_t ungated;       /* 1: the dense FFN is down(act(up x)), without a gate */
    float score_cap;        /* above 0: a scaled attention score s becomes cap * tanh(s / cap) */
    float rope_gain;        /* multiplies cosines and sines; 0 means 1 */
    float query_growth;     /* queries are multiplied, after rotary embedding, by 1 + growth *
                               ln(1 + floor((position + start) / period)); 0: they are not */
    uint32_t query_period;
    uint32_t query_start;
    uint32_t reserved[7];
} cflow_layer;

typedef enum {
    CFLOW_EMBEDDING = 0,
    CFLOW_HEAD = 1,
    CFLOW_FINAL_NORM = 2, /* vector */
    CFLOW_NORM1 = 3,      /* vector: before attention */
    CFLOW_NORM2 = 4,      /* vector: before the FFN */
    CFLOW_NORM3 = 5,      /* vector: before router and experts, unless norms_shared */
    CFLOW_Q = 6,
    CFLOW_K = 7,
    CFLOW_V = 8,
    CFLOW_O = 9,
    CFLOW_Q_BIAS = 10, /* vectors, each optional */
    CFLOW_K_BIAS = 11,
    CFLOW_V_BIAS = 12,
    CFLOW_O_BIAS = 13,
    CFLOW_Q_NORM = 14, /* vectors */
    CFLOW_K_NORM = 15,
    CFLOW_GATE = 16,
    CFLOW_UP = 17,
    CFLOW_DOWN = 18,
    CFLOW_ROUTER = 19, /* (n_experts, d_model), f32 */
    CFLOW_SHARED_GATE = 20,
    CFLOW_SHARED_UP = 21,
    CFLOW_SHARED_DOWN = 22,
    CFLOW_SHARED_SCALE = 23, /* (1, d_model), f32: the shared expert's sigmoid gate */
    CFLOW_EXPERT_GATE = 24,  /* these three are in every record, at an offset from its start */
    CFLOW_EXPERT_UP = 25,
    CFLOW_EXPERT_DOWN = 26,
    CFLOW_POST_NORM1 = 27, /* vectors: of the output of attention, and of the dense FFN */
    CFLOW_POST_NORM2 = 28,
    CFLOW_NORM1_BIAS = 29, /* vectors, each optional; of layer norms */
    CFLOW_NORM2_BIAS = 30,
    CFLOW_FINAL_NORM_BIAS = 31,
    CFLOW_GATE_BIAS = 32, /* vectors, each optional; of the dense FFN */
    CFLOW_UP_BIAS = 33,
    CFLOW_DOWN_BIAS = 34,
    CFLOW_ROPE_DIVISORS = 35,      /* vector (rope_dim / 2,), optional: divides the frequencies */
    CFLOW_ROPE_DIVISORS_LONG = 36, /* the same, optional, for contexts that are longer than
                                      rope_original_context */
    CFLOW_N_ROLES = 37
} cflow_role;

typedef struct {            /* file: 48 bytes */
    uint32_t role;          /* cflow_role */
    uint32_t block;         /* weight block, or CFLOW_MODEL_LEVEL */
    uint32_t encoding;      /* cflow_encoding; CFLOW_F32 for vectors and the router */
    uint32_t n_rows;        /* outputs; 1 for a vector */
    uint32_t n_cols;        /* inputs; the length of a vector */
    uint32_t stripe_rows;   /* 32, 64, 96 or 128; 0: a vector of n_cols plain f32 */
    uint64_t offset;        /* of the first stripe in its bank or record, a multiple of 64 */
    uint64_t stripe_stride; /* bytes from one stripe to the next (gate and up interleave) */
    uint64_t reserved;
} cflow_tensor;

typedef struct { /* file: 32 bytes; one expert of a weight block, ordered by (block, expert) */
    uint32_t block;
    uint32_t expert;
    uint64_t offset; /* from the start of the expert bank, a multiple of 4096 */
    uint64_t bytes;  /* without the padding to a multiple of 4096 */
    uint32_t crc;    /* CRC-32C of the padded record */
    uint32_t reserved;
} cflow_record;

/* ---- model ----------------------------------------------------------------------------------- */

typedef struct cflow_model cflow_model;

typedef struct { /* updated by the loading threads; may be read at any time */
    uint64_t done_bytes;
    uint64_t total_bytes;
    int32_t cancel; /* set to 1 to make cflow_model_open return CFLOW_ECANCELLED */
    int32_t reserved;
} cflow_progress;

typedef enum { CFLOW_IO_DIRECT = 0, CFLOW_IO_CACHED = 1 } cflow_io;

/* When the reads of experts begin. LAYER and NONE exist only to measure what DELAY gains. */
typedef enum {
    CFLOW_WINDOW_DELAY = 0, /* once their own layer's router has chosen them */
    CFLOW_WINDOW_LAYER = 1, /* once the router of the layer that adds their output has run */
    CFLOW_WINDOW_NONE = 2   /* when they are needed, with no compute meanwhile; one context only */
} cflow_window;

typedef struct {
    const char *path;
    int32_t n_threads;     /* threads that read the weights, at least 1 */
    int32_t header_only;   /* 1: read no weights; the file may lack its banks; steps cannot run */
    int32_t as_f32;        /* 1: hold the weights dequantised to f32, for debugging */
    int32_t expert_io;     /* cflow_io: bypass the page cache (where possible), or use it */
    uint64_t expert_cache; /* bytes of RAM for experts; the others stay in the file and are read
                              when they are needed; 0: all experts are in RAM */
    int32_t expert_reads;  /* most reads in flight, 1 to 64 */
    int32_t speculate;     /* 1: without a delay, read the experts ahead that the next layer's
                              router would choose for this layer's stream; 0: only to measure */
    int32_t defer_experts; /* add this many experts of each token, those with the least weight, one
                              layer late, which gives their reads more time and changes the output;
                              less than top_k; never in the last layer; 0: none */
    int32_t expert_window; /* cflow_window; above 0 only to measure */
    double expert_timeout_s;   /* above 0: an expert's read that takes longer has failed */
    double expert_bytes_per_s; /* limit on the rate of expert reads; 0: none */
    uint64_t weights_memory;   /* bytes of RAM for the matrices of layers; the others stay in the
                                  file and are read in every step; 0: all are in RAM. The options
                                  expert_io, _threads, _timeout_s and _bytes_per_s apply to these
                                  reads too, separately */
    cflow_progress *progress;  /* NULL: not reported, cannot be cancelled */
} cflow_model_options;

/* Opens and checks a model file and reads its weights, by direct I/O where the file system allows
 * it. Errors: EFORMAT names the part of the file and the numbers; EIO; ENOMEM says how many bytes;
 * ECANCELLED; EINVAL, with the numbers, for
 *   - an expert_cache of less than expert_reads + 1 records, or without experts, or with as_f32
 *   - a weights_memory of less than cflow_layer_records.n_least slots, or with as_f32
 *   - a defer_experts that is not below every layer's top_k */
cflow_status cflow_model_open(cflow_model **out, const cflow_model_options *options,
                              cflow_error *err);
void cflow_model_close(cflow_model *model);

typedef struct {
    uint64_t resident_bytes; /* allocated for weights that stay in RAM and for caches of others */
    uint64_t huge_bytes;     /* of these, backed by huge pages now */
    double load_s;           /* seconds that loading took */
    int32_t direct_io;       /* 1: the weights were read past the page cache */
    int32_t reserved;
} cflow_memory;

const cflow_header *cflow_model_header(const cflow_model *model);
const cflow_layer *cflow_model_layer(const cflow_model *model, uint32_t layer);
const cflow_tensor *cflow_model_tensor(const cflow_model *model, uint32_t index);
const void *cflow_model_section(const cflow_model *model, uint32_t section, uint64_t *bytes);
void cflow_model_memory(const cflow_model *model, cflow_memory *out);
/* Dequantises rows [first, first + n) of tensor `index` into out (n, n_cols), for tests and the
 * inspect command. `expert` is used for the expert roles only. */
cflow_status cflow_model_rows(const cflow_model *model, uint32_t index, uint32_t expert,
                              uint32_t first, uint32_t n, float *out, cflow_error *err);

#define CFLOW_LATENCIES 20

/* A cache of records: its size, its state now, and its counters since the model was opened. Experts
 * are demanded once per step, layer and distinct expert; each demand is a hit or a miss. */
typedef struct {
    uint32_t n_records;   /* in the file */
    uint32_t n_slots;     /* records that fit in RAM */
    uint64_t slot_bytes;  /* of a slot, the size of the largest record */
    uint32_t n_resident;  /* records in RAM now */
    uint32_t n_loading;   /* records being read now */
    uint32_t n_overdue;   /* of these, for longer than expert_timeout_s */
    int32_t direct_io;    /* 1: reads bypass the page cache */
    uint64_t hits;        /* demands for a record that was in RAM or queued by an earlier demand */
    uint64_t misses;      /* all other demands, speculated records included */
    uint64_t reads;       /* of records, without those of cflow_model_warm */
    uint64_t disk_bytes;  /* of these reads */
    uint64_t warm_bytes;  /* read by cflow_model_warm */
    uint64_t extra_reads; /* of records that were evicted between demand and use, or that only
                             cflow_model_rows asked for */
    uint64_t evictions;
    uint64_t speculated;     /* records speculated whose read began, or that were demanded before */
    uint64_t useful;         /* of these, in RAM when they were demanded */
    uint64_t late;           /* of these, queued or loading when they were demanded */
    uint64_t wasted;         /* of these, evicted or failed before they were demanded */
    uint64_t failed_io;      /* reads that the operating system failed */
    uint64_t failed_cut;     /* reads past the end of the file */
    uint64_t failed_altered; /* reads whose checksum was wrong */
    uint64_t failed_timed_out;           /* reads that took longer than expert_timeout_s */
    uint64_t stall_ns;                   /* time that steps slept because a record was missing */
    uint64_t read_ns;                    /* sum of the durations of all reads */
    uint64_t latencies[CFLOW_LATENCIES]; /* [i]: reads that took from 32 us << i to 64 us << i; the
                                            first counts shorter ones too, the last longer ones */
    uint64_t ghost_hits_2x;              /* demands that a cache of 2 n_slots would have held */
    uint64_t ghost_hits_4x;              /* demands that a cache of 4 n_slots would have held */
} cflow_tier_stats;

/* The expert cache; all zero without one. May be called from any thread at any time. */
void cflow_model_tier(const cflow_model *model, cflow_tier_stats *out);

/* The records of the resident bank under weights_memory. Each holds the matrices of a weight block,
 * widened to whole MiB. Embedding, head and vectors always stay in RAM and are not counted. */
typedef struct {
    uint32_t n_records;
    uint32_t n_slots;    /* records that fit in RAM */
    uint32_t n_least;    /* the smallest n_slots: those a stage needs at once, and one for each read
                            in flight */
    uint32_t n_kept;     /* records that stay in RAM */
    uint64_t slot_bytes; /* of a slot, the size of the largest record */
    uint64_t bytes;      /* of all records */
    uint64_t step_bytes; /* read in every step */
} cflow_layer_records;

/* All zero without weights_memory. */
void cflow_model_layer_records(const cflow_model *model, cflow_layer_records *out);
/* The cache of these records; all zero without weights_memory, or with header_only. May be called
 * from any thread at any time. */
void cflow_model_layer_tier(const cflow_model *model, cflow_tier_stats *out);
/* uses (n_records,): how often each expert was demanded, uses given to cflow_model_warm included.
 */
void cflow_model_expert_uses(const cflow_model *model, uint64_t *uses);
/* Warm start: takes over the uses (n_records,) of an earlier run and reads the most used experts,
 * as many as fit, in the file's order. Those whose reads fail are left out and counted. Does
 * nothing without an expert cache. progress may be NULL. Errors: ECANCELLED after progress->cancel,
 * ENOMEM.
 */
cflow_status cflow_model_warm(const cflow_model *model, const uint64_t *uses,
                              cflow_progress *progress, cflow_error *err);

/* ---- plan ------------------------------------------------------------------------------------ */

typedef struct {
    uint32_t n_stages; /* of all layers, without the head */
    uint32_t n_barriers;
    uint32_t n_ops;
    uint32_t n_values;            /* buffers, after reuse */
    uint64_t bytes_per_token;     /* weights that a step of one row reads, head included */
    uint64_t layer_bytes;         /* the same without the head */
    uint64_t critical_path_bytes; /* weights on the longest path through the layers' graph */
    double critical_path_closed_form_bytes; /* sum max(attn, dense/(dd+1), experts/(de+1)) */
    uint64_t kv_bytes_per_token;            /* of all layers, as f16 */
} cflow_plan_info;

typedef struct {
    char name[32]; /* "L3.gate_up" */
    uint32_t stage;
    int32_t layer;   /* n_layers: after the layers */
    uint64_t bytes;  /* weights that one row reads */
    char reads[128]; /* names of values, space-separated */
    char writes[64]; /* the same */
} cflow_op_info;

void cflow_model_plan(const cflow_model *model, cflow_plan_info *out);
/* out (n_tensors,): indices of all tensors in the order in which a step first reads them: op by op,
 * the head (or tied embedding) last. */
void cflow_model_reading_order(const cflow_model *model, uint32_t *out);
cflow_status cflow_model_op(const cflow_model *model, uint32_t index, cflow_op_info *out,
                            cflow_error *err);

/* ---- context --------------------------------------------------------------------------------- */

typedef struct cflow_ctx cflow_ctx;

typedef enum {
    CFLOW_KV_F16 = 0,
    CFLOW_KV_F32 = 1,
    CFLOW_KV_BF16 = 2,
    CFLOW_KV_Q8 = 3
} cflow_kv_type;
#define CFLOW_KV_BLOCK 32 /* positions of a KV block */

typedef struct {
    const char *isa;       /* "scalar", "avx2" or "avx512vnni"; NULL: the best the CPU has */
    int32_t n_threads;     /* the caller of cflow_ctx_step included */
    int32_t max_rows;      /* of one step */
    int32_t max_sequences; /* sequences are 0 .. max_sequences - 1; also the most rows of a step
                              that keep their logits */
    int32_t max_context;   /* positions of one sequence */
    int32_t n_kv_blocks;
    int32_t kv_type;     /* cflow_kv_type; must be f32 if the model is as_f32 */
    int32_t keep_values; /* 1: no buffer is reused, so that cflow_ctx_value can read them all */
    int32_t reserved;
} cflow_ctx_options;

/* The bytes that cflow_ctx_open would allocate: for KV blocks, and for everything else. */
cflow_status cflow_ctx_memory(uint64_t *kv_bytes, uint64_t *scratch_bytes, const cflow_model *model,
                              const cflow_ctx_options *options, cflow_error *err);
cflow_status cflow_ctx_open(cflow_ctx **out, cflow_model *model, const cflow_ctx_options *options,
                            cflow_error *err);
void cflow_ctx_close(cflow_ctx *ctx);
const char *cflow_ctx_isa(const cflow_ctx *ctx);

/* Sets the block table of `sequence`: position p is stored in blocks[p / CFLOW_KV_BLOCK]. */
cflow_status cflow_ctx_bind(cflow_ctx *ctx, int32_t sequence, const int32_t *blocks,
                            int32_t n_blocks, cflow_error *err);
cflow_status cflow_ctx_copy_block(cflow_ctx *ctx, int32_t from, int32_t to, cflow_error *err);
/* Zeroes a block; needed before it is given to another sequence. */
cflow_status cflow_ctx_clear_block(cflow_ctx *ctx, int32_t block, cflow_error *err);

#define CFLOW_ROW_LOGITS 1 /* keep the row's logits for cflow_ctx_sample */
#define CFLOW_ROW_SCORE 2  /* report the log-probability of `target` after this row */
#define CFLOW_MAX_TOP 20

typedef struct {
    int32_t sequence;
    int32_t token;
    int32_t position;
    uint32_t flags;
    int32_t target;    /* SCORE only */
    int32_t n_top;     /* SCORE only: how many of the best tokens to report, 0 .. CFLOW_MAX_TOP */
    int32_t n_experts; /* experts for this row, up to the model's top_k; 0: top_k */
    int32_t reserved;
} cflow_row;

typedef struct { /* log-probabilities under the softmax of the raw logits */
    int32_t token;
    int32_t rank; /* number of tokens that are more likely */
    float logprob;
    int32_t n_top;
    int32_t top_tokens[CFLOW_MAX_TOP]; /* best first; of equals the smaller id first */
    float top_logprobs[CFLOW_MAX_TOP];
} cflow_score;

/* Runs one forward pass over n_rows rows. The rows of a sequence have rising positions, which
 * continue those already in its KV blocks.
 * scores: one for each SCORE row, in row order; NULL if there are none.
 * row_status (n_rows,): OK, ENUMERIC, or EIO or EFORMAT if weights could not be read or had wrong
 * bytes: those of a layer, or of an expert that the row or an earlier row of its sequence chose. A
 * row with EIO or EFORMAT keeps no logits, its score is empty (token -1), and the KV that it wrote
 * is not valid. It does not affect rows of other sequences.
 * Errors: EINVAL; ECANCELLED, after which no row has logits or a score. */
cflow_status cflow_ctx_step(cflow_ctx *ctx, const cflow_row *rows, int32_t n_rows,
                            int32_t *row_status, cflow_score *scores, cflow_error *err);
/* Logits (vocab_size,) of row `row` of the last step; NULL if it kept none. */
const float *cflow_ctx_logits(const cflow_ctx *ctx, int32_t row);

/* Why a row of the last step has status EIO or EFORMAT: "layer 3, expert 17: the file ends inside
 * it"; for the layer's own weights "layer 3: ...". Empty for any other row. */
void cflow_ctx_row_error(const cflow_ctx *ctx, int32_t row, cflow_error *out);

/* A row's use of weights on disk. An expert is charged to the first row that chose it, a layer to
 * the first row of the step. */
typedef struct {
    uint32_t expert_hits;
    uint32_t expert_misses;
    uint32_t layer_reads; /* with weights_memory: records of layers that were not in RAM */
    uint32_t reserved;
    uint64_t disk_bytes; /* of expert_misses and layer_reads */
    uint64_t stall_ns;   /* time that the step slept for these records */
} cflow_row_usage;

/* Usage (n_rows,) of the last step; NULL if all weights are in RAM. */
const cflow_row_usage *cflow_ctx_usage(const cflow_ctx *ctx);

typedef struct {
    int32_t row;           /* of the last step, with LOGITS */
    int32_t choice, index; /* counter of the random generator: which answer, which output token */
    int32_t n_top; /* best tokens to report, up to CFLOW_MAX_TOP; -1: no log-probabilities */
    uint64_t seed;
    float temperature;        /* 0: greedy */
    float top_p;              /* 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 1: off; over prompt and output */
    float frequency_penalty;  /* 0: off; over the output */
    float presence_penalty;   /* 0: off; over the output */
    int32_t top_k;            /* 0: off */
    int32_t n_prompt;         /* leading tokens of history that are the prompt */
    int32_t n_history;
    int32_t n_bias;
    const int32_t *history;  /* (n_history,) prompt, then output */
    const int32_t *bias_ids; /* (n_bias,) */
    const float *bias;       /* (n_bias,) added to the logits */
    const uint32_t *mask;    /* (ceil(n_tokens / 32),) bit set: token allowed; NULL: all are */
} cflow_pick;

typedef struct {
    int32_t status; /* OK, EINVAL (no token is allowed), ENUMERIC */
    int32_t reserved;
    cflow_score score; /* score.token is the chosen one; the rest is set if n_top >= 0 */
} cflow_choice;

/* Chooses a token for each pick. Penalties, bias, mask, temperature, min_p, top_k and top_p are
 * applied in this order; the random number is Philox(seed, choice, index). */
cflow_status cflow_ctx_sample(cflow_ctx *ctx, const cflow_pick *picks, int32_t n_picks,
                              cflow_choice *choices, cflow_error *err);

/* Ends the running step early. May be called from any thread. */
void cflow_ctx_cancel(cflow_ctx *ctx);
/* A counter that grows while a step makes progress: by one for every stage, two for the head, and,
 * if weights are on disk, one for every wave of experts and every wait that ended. May be called
 * from any thread. */
uint64_t cflow_ctx_stage_count(const cflow_ctx *ctx);
/* Bytes of weights that all steps so far have read from memory. */
uint64_t cflow_ctx_read_bytes(const cflow_ctx *ctx);

typedef struct {      /* of a stage, over all steps so far */
    uint64_t ns;      /* from its beginning to that of the next one */
    uint64_t idle_ns; /* time without work in it, summed over all threads */
} cflow_stage_time;

/* out (n_stages + 2,): the stages of the plan, the head, and the checks and scores of its logits.
 */
void cflow_ctx_stage_times(const cflow_ctx *ctx, cflow_stage_time *out);

/* Copies row `row` of value `name` ("L0.q") of the last step to out, which has room for n floats;
 * *n_out: floats of that row. "L0.routed" has the ids of the chosen experts, "L0.routed_weights"
 * their weights. EINVAL without keep_values, except for "final_norm", which the head reads. */
cflow_status cflow_ctx_value(const cflow_ctx *ctx, const char *name, int32_t row, float *out,
                             int32_t n, int32_t *n_out, cflow_error *err);

/* ---- tools ----------------------------------------------------------------------------------- */

/* CRC-32C (Castagnoli) of data. crc: that of the data before it, 0 if there is none. */
uint32_t cflow_crc32c(uint32_t crc, const void *data, size_t bytes);
/* Read bandwidth of main memory in bytes per second: the best of `passes` over `bytes` of memory
 * that it allocates. EINVAL, ENOMEM. */
cflow_status cflow_probe_bandwidth(double *bytes_per_s, uint64_t bytes, int32_t n_threads,
                                   int32_t passes, cflow_error *err);
/* The best instruction set of this CPU: "scalar", "avx2" or "avx512vnni". */
const char *cflow_best_isa(void);

/* cffi: end */

#endif
