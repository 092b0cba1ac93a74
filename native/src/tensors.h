/* The tensor and record tables, matched against what the layers need. */
#ifndef CFLOW_TENSORS_H
#define CFLOW_TENSORS_H

#include "weights.h"

/* Checks both tables and fills global, blocks, first_record; every tensor present has the data
 * WEIGHTS_ELSEWHERE until they are loaded. EFORMAT names the tensor and the numbers. */
cflow_status tensors_bind(model_weights *m, cflow_error *err);

/* "block 3 gate", "embedding" */
void tensor_name(char out[64], const cflow_tensor *t);
int tensor_is_expert(const cflow_tensor *t);
/* The matrix a tensor of the table became; and the same for the loader to write. */
const matrix *tensor_matrix(const model_weights *m, const cflow_tensor *t);
matrix *tensor_entry(model_weights *m, const cflow_tensor *t);
/* The index of the tensor that matrix w became; n_tensors: none, the file lacks it. */
uint32_t tensor_of(const model_weights *m, const matrix *w);
/* The first byte behind it, from the start of its bank or record. */
uint64_t tensor_end(const cflow_tensor *t);
/* A record's bytes with its padding. */
uint64_t record_bytes(const cflow_record *r);

#endif
