/* Mixture of experts: OP_SELECT, OP_SPECULATE, OP_EXPERT_GATED and OP_EXPERT_DOWN. */
#ifndef CFLOW_MOE_H
#define CFLOW_MOE_H

#include "ops.h"

void select_run(cflow_ctx *ctx, const op *o, int thread);
void speculate_run(cflow_ctx *ctx, const op *o, int thread);
/* How many experts are in the op now; the span of the index-th of them; its units [first, end). */
uint32_t expert_spans(const cflow_ctx *ctx, const op *o);
span expert_span(const cflow_ctx *ctx, const op *o, uint32_t index);
void expert_run(const cflow_ctx *ctx, const op *o, uint32_t index, uint32_t first, uint32_t end,
                int thread);

#endif
