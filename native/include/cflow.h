/* cflow: a CPU-first streaming inference engine for language models.
 *
 *     cflow_model *model; cflow_ctx *ctx; cflow_error err;
 *     cflow_model_open(&model, &(cflow_model_options){.path = "x.cflow", .n_threads = 2}, &err);
 *     cflow_ctx_open(&ctx, model, &(cflow_ctx_options){.n_threads = 2, ...}, &err);
 *     cflow_ctx_bind(ctx, 0, blocks, n_blocks, &err);
 *     cflow_ctx_step(ctx, rows, n_rows, row_status, scores, &err);
 *     cflow_ctx_sample(ctx, picks, n_picks, choices, &err);
 *
 * bind gives sequence 0 its KV blocks, step runs one forward of any mix of rows, sample takes
 * tokens from the logits that step kept.
 *
 * Rules. A call that can fail returns cflow_status, with its text in *err (the caller owns it, NULL
 * is allowed). What comes through ** is closed by whoever got it, in any order: a model lives on
 * until its last context is closed. close(NULL) is a no-op. Pointers given by accessors live as
 * long as their handle. A model is immutable and may be read from any thread; a context belongs to
 * one caller at a time, except cflow_ctx_cancel and cflow_ctx_stage_count. No globals, no
 * environment, no output, no exit. All memory is taken when a handle is opened.
 *
 * The structs marked "file" are the on-disk records (little-endian, natural alignment, no padding
 * holes); docs/format.md draws the whole file. Everything between the cffi marks is also the cdef.
 */
#ifndef CFLOW_H
#define CFLOW_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

typedef enum {
    CFLOW_OK = 0,
    CFLOW_EINVAL = -1,       /* a wrong call: argument out of range, missing instruction set */
    CFLOW_ENOMEM = -2,       /* the memory asked for is not to be had */
    CFLOW_EIO = -3,          /* the operating system failed a read */
    CFLOW_EFORMAT = -4,      /* the file is not what it says: truncated, altered, inconsistent */
    CFLOW_EUNSUPPORTED = -5, /* valid, but this build cannot run it */
    CFLOW_ECANCELLED = -6,   /* cflow_ctx_cancel, or progress->cancel, was honoured */
    CFLOW_ENUMERIC = -7      /* a row's logits are not finite */
} cflow_status;

typedef struct {
    char text[512];
} cflow_error;

/* ---- the model file -------------------------------------------------------------------------- */

#define CFLOW_VERSION 1
#define CFLOW_N_SECTIONS 10
#define CFLOW_MODEL_LEVEL 0xffffffff /* the block of a tensor that belongs to no layer */

/* How the weights lie in the banks: layer by layer, or as cflow_model_reading_order said when the
 * file was made. Readers go by offsets and trust neither. */
typedef enum { CFLOW_ORDER_LAYER = 0, CFLOW_ORDER_STAGE = 1 } cflow_order;

/* How the numbers of a matrix are stored. One group is 16 rows; sizes are bytes a group and 32
 * columns, or a group and tile (256 columns) for the k forms. docs/format.md has the bit layout. */
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
    CFLOW_SECTION_RESIDENT = 7,    /* all matrices and vectors but the experts' */
    CFLOW_SECTION_EXPERT_BANK = 8  /* records, each 4096-aligned */
} cflow_section_id;

typedef struct {     /* file */
    uint64_t offset; /* from the start of the file, multiple of 4096 */
    uint64_t bytes;
    uint32_t crc; /* CRC-32C of the section; 0 for the two banks, which have finer ones */
    uint32_t reserved;
} cflow_section;

typedef struct {   /* file: the first 4096 bytes */
    char magic[8]; /* "cflow\r\n\x1a" */
    uint32_t version;
    uint32_t order; /* cflow_order */
    uint64_t file_bytes;
    uint32_t n_layers;
    uint32_t n_blocks; /* sets of layer weights; fewer than n_layers where layers share */
    uint32_t d_model;
    uint32_t vocab_size; /* rows of embedding and head */
    uint32_t n_tokens;   /* ids below it exist in the tokenizer; rows past it are never sampled */
    uint32_t context;    /* positions the model was made for */
    uint32_t n_tensors;
    uint32_t n_records;
    uint32_t tied;         /* 1: the head is the embedding */
    float embedding_scale; /* multiplies embedding rows; 1 normally */
    float final_norm_eps;
    float final_norm_offset; /* 1 where the norm multiplies by (1 + w) */
    cflow_section sections[CFLOW_N_SECTIONS];
    uint8_t reserved[3780];
    uint32_t crc; /* CRC-32C of the 4092 bytes before it */
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
    CFLOW_QK_NORM_HEAD = 1, /* RMSNorm over each head, weight (head_dim,) */
    CFLOW_QK_NORM_FULL = 2  /* RMSNorm over the whole projection, weight (n_heads * head_dim,) */
} cflow_qk_norm;
typedef enum {
    CFLOW_SILU = 0,
    CFLOW_GELU_TANH = 1, /* x / (1 + exp(-2 sqrt(2/pi) (x + 0.044715 x^3))) */
    CFLOW_GELU_ERF = 2
} cflow_activation;
typedef enum {
    CFLOW_POST_ATTENTION = 0, /* x_in[l] + attention of l */
    CFLOW_X_IN = 1,           /* x_in[l] */
    CFLOW_X_IN_PREVIOUS = 2   /* x_in[l-1]; the embedding for l = 0; dense_source only */
} cflow_source;

typedef struct {    /* file: one layer, 192 bytes */
    uint32_t block; /* whose weights it uses */
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t window;  /* 0: attends to all earlier positions */
    uint32_t qk_norm; /* cflow_qk_norm */
    uint32_t v_norm;  /* 1: RMSNorm over each head of V, no weight */
    float attention_scale;
    uint32_t rope_kind; /* cflow_rope_kind */
    uint32_t rope_dim;  /* leading dimensions of a head that rotate */
    float rope_base;
    uint32_t rope_scaling; /* cflow_rope_scaling */
    float rope_factor;
    float rope_low_freq;  /* Llama 3: low_freq_factor */
    float rope_high_freq; /* Llama 3: high_freq_factor */
    uint32_t rope_original_context;
    uint32_t d_ff;             /* dense FFN width; 0: none */
    uint32_t activation;       /* cflow_activation, dense and experts alike */
    uint32_t activation_on_up; /* 0: act(gate) * up; 1: gate * act(up) */
    uint32_t n_experts;        /* 0: none */
    uint32_t top_k;
    uint32_t renormalise; /* 1: the chosen weights are divided by their sum */
    float expert_scale;   /* multiplies the routing weights */
    uint32_t d_expert;
    uint32_t d_shared;    /* width of the shared expert; 0: none */
    uint32_t shared_gate; /* 1: its output is multiplied by sigmoid(w . x) */
    float norm_eps;
    float norm_offset;      /* 0, or 1 where a norm multiplies by (1 + w) */
    uint32_t norms_shared;  /* 1: experts use norm2; 0: experts have norm3 of their own */
    uint32_t dense_source;  /* cflow_source: what the dense FFN reads */
    uint32_t expert_anchor; /* cflow_source: what router, experts and shared expert read */
    uint32_t expert_delay;  /* expert output of layer l joins the stream after layer l + delay */
    float residual_scale;   /* multiplies attention and dense output */
    uint32_t reserved[15];
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
    CFLOW_Q_BIAS = 10, /* vectors; a missing bias is no bias */
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
    CFLOW_EXPERT_GATE = 24,  /* these three lie in every record; offset counts from its start */
    CFLOW_EXPERT_UP = 25,
    CFLOW_EXPERT_DOWN = 26,
    CFLOW_N_ROLES = 27
} cflow_role;

typedef struct {          /* file: 48 bytes */
    uint32_t role;        /* cflow_role */
    uint32_t block;       /* weight block, or CFLOW_MODEL_LEVEL */
    uint32_t encoding;    /* cflow_encoding; vectors and router f32 */
    uint32_t n_rows;      /* outputs; 1 for a vector */
    uint32_t n_cols;      /* inputs; a vector's length */
    uint32_t stripe_rows; /* 32, 64, 96 or 128; 0 marks a vector: n_cols plain f32 */
    uint64_t offset; /* of the first stripe, from the start of its bank or record, multiple of 64 */
    uint64_t stripe_stride; /* bytes from a stripe to the next (gate and up interleave) */
    uint64_t reserved;
} cflow_tensor;

typedef struct { /* file: 32 bytes; one expert of one block, ordered by (block, expert) */
    uint32_t block;
    uint32_t expert;
    uint64_t offset; /* from the start of the expert bank, multiple of 4096 */
    uint64_t bytes;  /* used; the record is padded to a multiple of 4096 */
    uint32_t crc;    /* CRC-32C of the padded record */
    uint32_t reserved;
} cflow_record;

/* ---- model ----------------------------------------------------------------------------------- */

typedef struct cflow_model cflow_model;

typedef struct { /* shared with the loading threads; read it any time */
    uint64_t done_bytes;
    uint64_t total_bytes;
    int32_t cancel; /* set to 1 to make cflow_model_open return CFLOW_ECANCELLED */
    int32_t reserved;
} cflow_progress;

typedef enum { CFLOW_IO_DIRECT = 0, CFLOW_IO_CACHED = 1 } cflow_io;

/* When experts are read. The others are there only to measure what the first is worth. */
typedef enum {
    CFLOW_WINDOW_DELAY = 0, /* once their own router has spoken */
    CFLOW_WINDOW_LAYER = 1, /* once the router of the layer in which they land has spoken */
    CFLOW_WINDOW_NONE = 2   /* when they are to run, and nothing runs meanwhile; one context */
} cflow_window;

typedef struct {
    const char *path;
    int32_t n_threads;     /* readers, at least 1 */
    int32_t header_only;   /* 1: no weights are read (and the banks may be absent); it cannot run */
    int32_t as_f32;        /* 1: weights are held dequantised to f32 (the debugging precision) */
    int32_t expert_io;     /* cflow_io: past the page cache where the file system allows, or not */
    uint64_t expert_cache; /* bytes of RAM for expert records, the others stay in the file; 0: all
                              are resident */
    int32_t expert_threads; /* reads in flight at most, 1 to 64 */
    int32_t speculate; /* 1: where experts have no delay, what the next layer's router makes of the
                          hidden state of this one is read ahead; 0 only to measure what that is
                          worth */
    int32_t defer_experts;   /* of a token's experts so many, those with the least weight, join the
                                stream a layer later, except in the last layer and never all; 0: none,
                                as the model says */
    int32_t expert_window;   /* cflow_window; above 0 only to measure */
    double expert_timeout_s; /* above 0: a read without an answer for so long has failed */
    double expert_bytes_per_s; /* bound on what is read in a second; 0: none */
    uint64_t weights_memory;   /* bytes of RAM for the matrices of layers, the others stay in the
                                  file and are read in every step; 0: all are resident. How: as
                                  experts, by expert_io, _threads, _timeout_s and _bytes_per_s, each
                                  for these reads alone */
    cflow_progress *progress;  /* NULL allowed */
} cflow_model_options;

/* Opens and checks a file, reads its weights by direct I/O where the file system allows it. Errors:
 * EFORMAT names the part and the numbers, EIO, ENOMEM says how many bytes, ECANCELLED; EINVAL with
 * the numbers for an expert cache below a record per read in flight and one more, for a model
 * without experts, or as_f32; for a weights_memory below cflow_layer_records.n_least, or as_f32;
 * for a defer_experts not below every layer's top_k. */
cflow_status cflow_model_open(cflow_model **out, const cflow_model_options *options,
                              cflow_error *err);
void cflow_model_close(cflow_model *model);

typedef struct {
    uint64_t resident_bytes; /* taken for weights: all of them, or all but experts, and the cache */
    uint64_t huge_bytes;     /* of those, how many the kernel backs with huge pages, read back */
    double load_s;
    int32_t direct_io; /* 1: the weights came by direct reads */
    int32_t reserved;
} cflow_memory;

const cflow_header *cflow_model_header(const cflow_model *model);
const cflow_layer *cflow_model_layer(const cflow_model *model, uint32_t layer);
const cflow_tensor *cflow_model_tensor(const cflow_model *model, uint32_t index);
const void *cflow_model_section(const cflow_model *model, uint32_t section, uint64_t *bytes);
void cflow_model_memory(const cflow_model *model, cflow_memory *out);
/* Dequantises rows [first, first + n) of tensor `index` into out (n, n_cols): for tests and
 * inspect. `expert` picks the record for the expert roles. */
cflow_status cflow_model_rows(const cflow_model *model, uint32_t index, uint32_t expert,
                              uint32_t first, uint32_t n, float *out, cflow_error *err);

#define CFLOW_LATENCIES 20

/* The expert cache: what it is, its counters since the model was opened, its state now. A hit or
 * miss is counted once per step, layer and distinct expert. */
typedef struct {
    uint32_t n_records;  /* of the model */
    uint32_t n_slots;    /* how many of them fit */
    uint64_t slot_bytes; /* of one, and what one read reads at most */
    uint32_t n_resident;
    uint32_t n_loading;
    uint32_t n_overdue; /* of n_loading, without an answer for longer than expert_timeout_s */
    int32_t direct_io;  /* 1: reads go past the page cache */
    uint64_t hits;      /* experts wanted that were resident, or being read for another step */
    uint64_t misses;    /* all others, also where speculation had read them already */
    uint64_t reads;     /* records, the warm start's apart */
    uint64_t disk_bytes;
    uint64_t warm_bytes;  /* read by cflow_model_warm */
    uint64_t extra_reads; /* of records that made room before they were used, or that a look at
                             their rows brought */
    uint64_t evictions;
    uint64_t speculated; /* reads begun because an expert was likely to be wanted; or wanted before
                            they began */
    uint64_t useful;     /* of those: done when it was wanted */
    uint64_t late;       /* begun, or still to begin */
    uint64_t wasted;     /* evicted or failed before it was wanted */
    uint64_t failed_io;  /* reads: the operating system failed it */
    uint64_t failed_cut; /* the file ends inside the record */
    uint64_t failed_altered;             /* the checksum is wrong */
    uint64_t failed_timed_out;           /* no answer in expert_timeout_s */
    uint64_t stall_ns;                   /* how long steps slept for want of a record */
    uint64_t read_ns;                    /* how long reads took, added up */
    uint64_t latencies[CFLOW_LATENCIES]; /* reads that took less than 64 us << i, but not less than
                                            half of that; the last also all longer ones */
    uint64_t ghost_hits_2x;              /* wants that a cache of twice n_slots would have held */
    uint64_t ghost_hits_4x;              /* four times */
} cflow_tier_stats;

/* All zero without an expert cache. Any thread, any time. */
void cflow_model_tier(const cflow_model *model, cflow_tier_stats *out);

/* With weights_memory: the resident bank's records. Each begins with a block's matrices and ends
 * where the next one's begin, widened to whole MiB; embedding, head and vectors are apart from it.
 */
typedef struct {
    uint32_t n_records;
    uint32_t n_slots; /* how many fit */
    uint32_t n_least; /* slots without which it cannot be: what a stage needs at once, and the reads
                         in flight */
    uint32_t n_kept;  /* records that stay */
    uint64_t slot_bytes;
    uint64_t bytes;      /* of all records */
    uint64_t step_bytes; /* read in every step */
} cflow_layer_records;

/* All zero without weights_memory. */
void cflow_model_layer_records(const cflow_model *model, cflow_layer_records *out);
/* Counters of these records. All zero without weights_memory or weights. Any thread, any time. */
void cflow_model_layer_tier(const cflow_model *model, cflow_tier_stats *out);
/* How often each record was wanted, (n_records,), what cflow_model_warm brought included. */
void cflow_model_expert_uses(const cflow_model *model, uint64_t *uses);
/* Warm start: takes over (n_records,) uses of an earlier run and reads the most used records, as
 * many as fit, in the file's order. Those that fail are left out and counted. Nothing to do without
 * an expert cache. ECANCELLED after progress->cancel (progress may be NULL), ENOMEM. */
cflow_status cflow_model_warm(const cflow_model *model, const uint64_t *uses,
                              cflow_progress *progress, cflow_error *err);

/* ---- plan ------------------------------------------------------------------------------------ */

typedef struct {
    uint32_t n_stages; /* a token through the layers, head left out */
    uint32_t n_barriers;
    uint32_t n_ops;
    uint32_t n_values;            /* buffers alive at once, after reuse */
    uint64_t bytes_per_token;     /* weights one decode step of one sequence reads, head included */
    uint64_t layer_bytes;         /* the same, layers only */
    uint64_t critical_path_bytes; /* longest path through the layers' graph, in weight bytes */
    double critical_path_closed_form_bytes; /* sum max(attn, dense/(dd+1), experts/(de+1)) */
    uint64_t kv_bytes_per_token;            /* all layers, f16 */
} cflow_plan_info;

typedef struct {
    char name[32]; /* "L3.gate_up" */
    uint32_t stage;
    int32_t layer; /* n_layers: after the layers */
    uint64_t bytes;
    char reads[128]; /* value names, space-separated */
    char writes[64];
} cflow_op_info;

void cflow_model_plan(const cflow_model *model, cflow_plan_info *out);
/* The tensors as indices, out (n_tensors,), in the order in which a step reads them: op by op of
 * the plan, each where it is first read, and the head (a tied embedding) last. */
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
#define CFLOW_KV_BLOCK 32 /* positions in a KV block */

typedef struct {
    const char *isa;   /* NULL: the best; else "scalar", "avx2", "avx512vnni"; missing: EINVAL */
    int32_t n_threads; /* the caller is thread 0 */
    int32_t max_rows;  /* in one step */
    int32_t max_sequences; /* sequence numbers are 0 .. max_sequences - 1; also rows with LOGITS a
                              step */
    int32_t max_context;   /* positions of one sequence */
    int32_t n_kv_blocks;
    int32_t kv_type;     /* cflow_kv_type; f32 when the model is as_f32 */
    int32_t keep_values; /* 1: every value keeps a buffer of its own, for cflow_ctx_value */
    int32_t reserved;
} cflow_ctx_options;

/* Bytes cflow_ctx_open would take: KV blocks first, then everything else. */
cflow_status cflow_ctx_memory(uint64_t *kv_bytes, uint64_t *scratch_bytes, const cflow_model *model,
                              const cflow_ctx_options *options, cflow_error *err);
cflow_status cflow_ctx_open(cflow_ctx **out, cflow_model *model, const cflow_ctx_options *options,
                            cflow_error *err);
void cflow_ctx_close(cflow_ctx *ctx);
const char *cflow_ctx_isa(const cflow_ctx *ctx);

/* Gives `sequence` its block table: position p lives in blocks[p / CFLOW_KV_BLOCK]. */
cflow_status cflow_ctx_bind(cflow_ctx *ctx, int32_t sequence, const int32_t *blocks,
                            int32_t n_blocks, cflow_error *err);
cflow_status cflow_ctx_copy_block(cflow_ctx *ctx, int32_t from, int32_t to, cflow_error *err);
/* Zeroes a block before its first use by a new owner. */
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
    int32_t n_top;     /* SCORE only: best tokens to report, 0 .. CFLOW_MAX_TOP */
    int32_t n_experts; /* experts for this row, 0: the model's top_k; at most top_k */
    int32_t reserved;
} cflow_row;

typedef struct { /* log-probabilities under softmax of the raw logits */
    int32_t token;
    int32_t rank; /* how many tokens are more likely */
    float logprob;
    int32_t n_top;
    int32_t top_tokens[CFLOW_MAX_TOP]; /* best first; ties by smaller id */
    float top_logprobs[CFLOW_MAX_TOP];
} cflow_score;

/* One forward of n_rows rows. Rows of one sequence come in rising position and follow on what the
 * sequence's blocks already hold. row_status (n_rows,): OK; ENUMERIC; or, where an expert that the
 * row or an earlier row of its sequence chose, or a layer, could not be read, EIO (no answer) or
 * EFORMAT (wrong bytes): such a row keeps no logits, its score is empty (token -1), and what it
 * wrote into its sequence's blocks is worthless. All other rows are as if it had not been there.
 * scores: one per SCORE row, in row order; NULL if there are none. ECANCELLED: nothing was kept. */
cflow_status cflow_ctx_step(cflow_ctx *ctx, const cflow_row *rows, int32_t n_rows,
                            int32_t *row_status, cflow_score *scores, cflow_error *err);
/* The kept logits of row `row` of the last step, (vocab_size,). NULL if it kept none. */
const float *cflow_ctx_logits(const cflow_ctx *ctx, int32_t row);

/* Why a row of the last step has the status EIO or EFORMAT: "layer 3, expert 17: the file ends
 * inside it"; "layer 3: .." where it is the layer's own weights. Empty for any other row. */
void cflow_ctx_row_error(const cflow_ctx *ctx, int32_t row, cflow_error *out);

typedef struct { /* what a row asked of the disk; an expert is charged to the first row that chose
                    it, a layer to the step's first */
    uint32_t expert_hits;
    uint32_t expert_misses;
    uint32_t layer_reads; /* with weights_memory: layers wanted that were not in memory */
    uint32_t reserved;
    uint64_t disk_bytes; /* of misses and layer_reads */
    uint64_t stall_ns;   /* how long the step slept for their sake */
} cflow_row_usage;

/* (n_rows,) of the last step. NULL where all weights are resident. */
const cflow_row_usage *cflow_ctx_usage(const cflow_ctx *ctx);

typedef struct {
    int32_t row;           /* of the last step, with LOGITS */
    int32_t choice, index; /* generator counter: which answer, which output token */
    int32_t n_top;         /* -1: no log-probabilities wanted */
    uint64_t seed;
    float temperature;        /* 0: greedy */
    float top_p;              /* 1: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 1: off; over prompt and output */
    float frequency_penalty;  /* 0: off; over the output */
    float presence_penalty;   /* 0: off; over the output */
    int32_t top_k;            /* 0: off */
    int32_t n_prompt;         /* leading tokens of history that are prompt */
    int32_t n_history;
    int32_t n_bias;
    const int32_t *history;  /* (n_history,) prompt then output */
    const int32_t *bias_ids; /* (n_bias,) */
    const float *bias;       /* (n_bias,) added to logits */
    const uint32_t *mask;    /* (ceil(n_tokens / 32),) bit set: allowed; NULL: all */
} cflow_pick;

typedef struct {
    int32_t status; /* OK, EINVAL (the mask allows nothing), ENUMERIC */
    int32_t reserved;
    cflow_score score; /* score.token is the choice; the rest only if n_top >= 0 */
} cflow_choice;

/* penalties, bias, mask, temperature, min_p, top_k, top_p, in this order; Philox(seed, choice,
 * index). */
cflow_status cflow_ctx_sample(cflow_ctx *ctx, const cflow_pick *picks, int32_t n_picks,
                              cflow_choice *choices, cflow_error *err);

void cflow_ctx_cancel(cflow_ctx *ctx); /* any thread: the running step ends early */
/* Any thread: grows while a step gets on, by one for every stage, two for the head, and where
 * weights come from disk by one for every wave of experts and every wait that ended. */
uint64_t cflow_ctx_stage_count(const cflow_ctx *ctx);
uint64_t cflow_ctx_read_bytes(const cflow_ctx *ctx); /* weight bytes streamed so far */

typedef struct {      /* of a stage, over all steps so far */
    uint64_t ns;      /* until the next one began */
    uint64_t idle_ns; /* of that, all threads together: waited for the others and for their call */
} cflow_stage_time;

/* out: (n_stages + 2,) the plan's stages, the head, and what is done with its logits. */
void cflow_ctx_stage_times(const cflow_ctx *ctx, cflow_stage_time *out);

/* keep_values only: row `row` of value `name` ("L0.q") of the last step. n: floats in out; *n_out:
 * the value's floats per row. "L0.routed" gives expert ids, "L0.routed_weights" their weights. */
cflow_status cflow_ctx_value(const cflow_ctx *ctx, const char *name, int32_t row, float *out,
                             int32_t n, int32_t *n_out, cflow_error *err);

/* ---- tools ----------------------------------------------------------------------------------- */

/* CRC-32C (Castagnoli) of data, continuing from crc (0 to begin). */
uint32_t cflow_crc32c(uint32_t crc, const void *data, size_t bytes);
/* Read bandwidth of main memory in bytes a second: best of `passes` over `bytes` of fresh memory.
 */
cflow_status cflow_probe_bandwidth(double *bytes_per_s, uint64_t bytes, int32_t n_threads,
                                   int32_t passes, cflow_error *err);
/* Best instruction set of this machine: "scalar", "avx2", "avx512vnni". */
const char *cflow_best_isa(void);

/* cffi: end */

#endif
