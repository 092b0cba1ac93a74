/* The weights of a checked file: read by several threads, every checksum verified. */
#ifndef CFLOW_LOAD_H
#define CFLOW_LOAD_H

#include "file.h"
#include "ring.h"
#include "weights.h"

/* Fills m->memory and points every matrix and, unless there is an expert cache, every expert
 * record into it; with a ring (or NULL) all but the matrices of layers. *taken: how much, and how
 * it was read. EFORMAT and EIO name the tensor or the record, ECANCELLED after
 * options->progress->cancel. */
cflow_status load_weights(model_weights *m, const ring *r, file *f,
                          const cflow_model_options *options, cflow_memory *taken,
                          cflow_error *err);

#endif
