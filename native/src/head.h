/* The head: computes logits in phases that follow the plan's stages. The first batch has the rows
 * that keep their logits, the others scored rows. Each batch has two phases: the product with the
 * head's matrix; then the check of kept logits, or the scores. */
#ifndef CFLOW_HEAD_H
#define CFLOW_HEAD_H

#include "ops.h"

/* Phases of this step's head, counted from 0. */
uint32_t head_phases(const cflow_ctx *ctx);
/* The units of a phase, and units [first, end) of it. */
span head_span(const cflow_ctx *ctx, uint32_t phase);
void head_run(cflow_ctx *ctx, uint32_t phase, uint32_t first, uint32_t end);

#endif
