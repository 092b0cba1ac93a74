/* The head, in phases after the plan's stages: for each batch of rows the product with the head's
 * matrix, then what is done with the logits. */
#ifndef CFLOW_HEAD_H
#define CFLOW_HEAD_H

#include "ops.h"

/* Phases of this step's head, counted from 0. */
uint32_t head_phases(const cflow_ctx *ctx);
/* The units of a phase, and units [first, end) of it. */
span head_span(const cflow_ctx *ctx, uint32_t phase);
void head_run(cflow_ctx *ctx, uint32_t phase, uint32_t first, uint32_t end);

#endif
