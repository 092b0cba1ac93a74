/* The layer records of a step: waits for those that a stage reads, pins them, and has later ones
 * read ahead as the ring (ring.h) has scheduled. Does nothing if the model has no ring.
 *
 * Called by one thread at a time, between two phases. */
#ifndef CFLOW_LAYERS_H
#define CFLOW_LAYERS_H

#include "ctx.h"

/* Before a phase: blocks until the records it reads are in memory, and pins them. Returns 0 if the
 * step was cancelled, or if a read failed, which fails every row. */
int layers_begin(cflow_ctx *ctx, uint32_t phase);
/* After a phase: unpins the records that no later stage reads, and demands as many others. */
void layers_end(cflow_ctx *ctx, uint32_t phase);
/* The step ends early: unpins all records and withdraws all demands. */
void layers_abandon(cflow_ctx *ctx);

#endif
