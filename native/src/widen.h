/* The debugging precision: every matrix held as f32, in the same stripes. */
#ifndef CFLOW_WIDEN_H
#define CFLOW_WIDEN_H

#include "pool.h"
#include "weights.h"

/* Replaces m->memory, read as stored, by their f32 form; both exist while this runs. ENOMEM. */
cflow_status widen_weights(model_weights *m, pool *threads, cflow_error *err);
/* Describes every matrix in its f32 form, without weights. */
void widen_shapes(model_weights *m);

#endif
