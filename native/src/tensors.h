/* The tensor and record tables, matched against what the layers need. */
#ifndef CFLOW_TENSORS_H
#define CFLOW_TENSORS_H

#include "model.h"

/* Checks both tables and fills global, blocks, first_record; every tensor present has the data
 * WEIGHTS_ELSEWHERE until they are loaded. EFORMAT names the tensor and the numbers. */
cflow_status tensors_bind(cflow_model *m, cflow_error *err);

/* "block 3 gate", "embedding" */
void tensor_name(char out[64], const cflow_tensor *t);
int tensor_is_expert(const cflow_tensor *t);
/* The matrix a tensor of the table became. */
matrix *tensor_matrix(const cflow_model *m, const cflow_tensor *t);
/* The first byte behind it, from the start of its bank or record. */
uint64_t tensor_end(const cflow_tensor *t);
/* A record's bytes with its padding. */
uint64_t record_bytes(const cflow_record *r);

#endif
