/* Loads the weights of a checked file with several threads, and checks every checksum. */
#ifndef CFLOW_LOAD_H
#define CFLOW_LOAD_H

#include "file.h"
#include "ring.h"
#include "weights.h"

/* Fills m->memory and points every matrix into it, and every expert record unless there is an
 * expert cache. Leaves out the matrices of layers if there is a ring (r may be NULL). *taken: how
 * much memory, and how it was read. Errors: EFORMAT and EIO name the tensor or the record; ENOMEM;
 * ECANCELLED after options->progress->cancel. */
cflow_status load_weights(model_weights *m, const ring *r, file *f,
                          const cflow_model_options *options, cflow_memory *taken,
                          cflow_error *err);

#endif
