/* The public handle: the weights of a model file, the plan of a step over them, and what reads
 * weights from disk. model_open.c makes all of them. */
#ifndef CFLOW_MODEL_H
#define CFLOW_MODEL_H

#include <stdatomic.h>

#include "plan.h"
#include "ring.h"
#include "tier.h"
#include "weights.h"

struct cflow_model {
    model_weights weights;
    plan *plan;
    tier *tier; /* expert records; NULL: all are in memory */
    ring *ring; /* layer records; NULL: the resident bank is in memory */
    cflow_memory memory;
    uint32_t most_pinned; /* records a step may pin while it waits for others */
    atomic_int n_holders; /* the caller that opened it, and its contexts */
    atomic_int is_taken;  /* 1: the only context it can have is open */
};

/* Keeps the model open until one more cflow_model_close. */
void model_hold(cflow_model *m);

#endif
