/* Attention: rotary tables, the layout of KV blocks, OP_KV and OP_ATTEND. */
#ifndef CFLOW_ATTENTION_H
#define CFLOW_ATTENTION_H

#include "ops.h"

enum {
    ATTEND_PART = 1024, /* positions in a part, a multiple of a KV block; changes the floats */
    CUT_UNITS = 4       /* rows are cut into parts when a thread has fewer units of attention */
};

/* The divisors (rope_dim / 2,) of a layer's frequencies in contexts of up to `context` positions;
 * NULL: there are none. */
const float *rope_divisors(const model_weights *m, uint32_t layer, uint32_t context);
/* Fills table (context, rope_dim): for each position rope_dim / 2 cosines, then as many sines. */
void rope_table(const cflow_layer *l, const float *divisors, uint32_t context, float *table);
/* Bytes of one KV head of a layer in a KV block, a multiple of 64. */
size_t kv_head_bytes(const cflow_layer *l, int32_t kv_type);

/* Scratch of one thread, in bytes. */
size_t attend_scratch(const model_weights *m);
/* The most parts that the cut rows of a step have together, and the bytes kept for each. */
uint64_t attend_cuts(const model_weights *m, const cflow_ctx_options *options);
size_t attend_partial_bytes(const model_weights *m);
/* Fills ctx->row_parts for the rows of the step: which are cut, and into how many parts. */
void attend_divide(cflow_ctx *ctx);

/* OP_KV and OP_ATTEND: their units, and units [first, end) of them. */
span kv_span(const cflow_ctx *ctx, const op *o);
void kv_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread);
span attend_span(const cflow_ctx *ctx, const op *o);
void attend_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread);

#endif
