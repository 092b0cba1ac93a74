/* The tensor and record tables of a file, checked against what its layers need. */
#ifndef CFLOW_TENSORS_H
#define CFLOW_TENSORS_H

#include "weights.h"

/* Checks both tables and fills m->global, blocks and first_record. The data of each tensor in the
 * file is WEIGHTS_ELSEWHERE until it is loaded. Errors: EFORMAT names the tensor and the numbers,
 * ENOMEM.
 */
cflow_status tensors_bind(model_weights *m, cflow_error *err);

/* Writes the name of a tensor to out: "block 3 gate", "embedding". */
void tensor_name(char out[64], const cflow_tensor *t);
int tensor_is_expert(const cflow_tensor *t);
/* The matrix of a tensor of the table; tensor_entry is for the loader, which writes it. */
const matrix *tensor_matrix(const model_weights *m, const cflow_tensor *t);
matrix *tensor_entry(model_weights *m, const cflow_tensor *t);
/* The index of the tensor of matrix w; n_tensors if the file has none. */
uint32_t tensor_of(const model_weights *m, const matrix *w);
/* The offset of the tensor's end in its bank or record. */
uint64_t tensor_end(const cflow_tensor *t);
/* Bytes of a record, padding included. */
uint64_t record_bytes(const cflow_record *r);

#endif
