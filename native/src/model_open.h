/* The loader: makes weights, plan, ring and tier, and joins them in a model. */
#ifndef CFLOW_MODEL_OPEN_H
#define CFLOW_MODEL_OPEN_H

#include "model.h"
#include "tier.h"

/* cflow_model_open, with `hooks` in place of the system's reads; NULL: the system's. */
cflow_status model_open(cflow_model **out, const cflow_model_options *options,
                        const tier_hooks *hooks, cflow_error *err);

#endif
