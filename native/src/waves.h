/* Experts as their records come. Where they are on disk, those whose records are there, pinned, run
 * as a wave; a phase with any other work does not wait for records. By one thread, and but for
 * waves_selected between two phases. */
#ifndef CFLOW_WAVES_H
#define CFLOW_WAVES_H

#include "ctx.h"

/* Has experts read, after OP_SELECT. scratch: 5 bytes for each of a layer. */
void waves_selected(cflow_ctx *ctx, const op *select, void *scratch);
/* 1 if the phase may have work. */
int waves_begin(cflow_ctx *ctx, uint32_t phase);
/* Waits for one more expert of the phase; 0 if there is none to wait for. */
int waves_wait(cflow_ctx *ctx, uint32_t phase);
/* The phase is over: unpins. The next one. */
uint32_t waves_end(cflow_ctx *ctx, uint32_t phase);
/* The step ends before `phase`: unpins and withdraws everything. */
void waves_abandon(cflow_ctx *ctx, uint32_t phase);

#endif
