/* The layer records that a step's stages read: waited for, pinned, and read ahead, as the ring is
 * scheduled. By one thread, between two phases. Without a ring there is nothing to do. */
#ifndef CFLOW_LAYERS_H
#define CFLOW_LAYERS_H

#include "ctx.h"

/* Waits for the records that the phase reads and pins them. 0: the step was cancelled, or a read
 * failed and with it every row. */
int layers_begin(cflow_ctx *ctx, uint32_t phase);
/* After the phase: unpins the records that no later stage reads, and has the next ones read. */
void layers_end(cflow_ctx *ctx, uint32_t phase);
/* The step ended early: unpins and withdraws everything. */
void layers_abandon(cflow_ctx *ctx);

#endif
