/* Waves of experts. If experts are on disk, those whose records are in memory are pinned and run
 * together as a wave. A step waits for records only in a phase that has no other work.
 *
 * Called by one thread at a time: waves_selected within a phase, all others between two phases. */
#ifndef CFLOW_WAVES_H
#define CFLOW_WAVES_H

#include "ctx.h"

/* After OP_SELECT: demands the records of the groups that the plan lists. scratch: 5 bytes
 * for each expert of a layer. */
void waves_selected(cflow_ctx *ctx, const op *select, void *scratch);
/* Chooses the wave of a phase. Returns 0 if the phase has no work and is skipped. */
int waves_begin(cflow_ctx *ctx, uint32_t phase);
/* Blocks until one more expert of the phase is in memory, has failed, or the step is cancelled.
 * Returns 0 if there is none to wait for. */
int waves_wait(cflow_ctx *ctx, uint32_t phase);
/* After a phase: unpins the experts that are done. Returns the next phase, which may be the same
 * one again. */
uint32_t waves_end(cflow_ctx *ctx, uint32_t phase);
/* The step ends early, before `phase`: unpins all experts and withdraws all demands. */
void waves_abandon(cflow_ctx *ctx, uint32_t phase);

#endif
