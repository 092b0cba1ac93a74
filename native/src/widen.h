/* as_f32, for debugging: all matrices held as f32, in the same stripes. */
#ifndef CFLOW_WIDEN_H
#define CFLOW_WIDEN_H

#include "pool.h"
#include "weights.h"

/* Replaces m->memory, loaded as stored, by the f32 form of the weights. Both are in memory while it
 * runs. Errors: ENOMEM. */
cflow_status widen_weights(model_weights *m, pool *threads, cflow_error *err);
/* Makes every matrix describe its f32 form, without touching weights. */
void widen_shapes(model_weights *m);

#endif
