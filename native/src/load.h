/* The weights of a checked file: read by several threads, every checksum verified. */
#ifndef CFLOW_LOAD_H
#define CFLOW_LOAD_H

#include "file.h"
#include "model.h"

/* Fills m->weights and points every matrix and, unless there is an expert cache, every expert
 * record into it; with m->ring all but the matrices of layers. EFORMAT and EIO name the tensor or
 * the record, ECANCELLED after options->progress->cancel. */
cflow_status load_weights(cflow_model *m, file *f, const cflow_model_options *options,
                          cflow_error *err);

#endif
