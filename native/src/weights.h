/* The contents of a model file: its headers, and where each weight lies in memory. Only the loader
 * writes it, except that a ring moves the matrices of layers (ring.h). */
#ifndef CFLOW_WEIGHTS_H
#define CFLOW_WEIGHTS_H

#include "arena.h"
#include "cflow.h"

/* The data of a tensor that is in the file but not in memory: not NULL, never read. */
#define WEIGHTS_ELSEWHERE ((const uint8_t *)64)

/* A matrix in stripes, or a vector of n_cols floats (stripe_rows is 0). */
typedef struct {
    const uint8_t *data; /* NULL: the file has no such tensor */
    uint32_t encoding;   /* cflow_encoding */
    uint32_t n_rows, n_cols;
    uint32_t stripe_rows;
    uint32_t n_stripes;
    uint32_t n_blocks;      /* 32-column quant blocks in a stripe, padding included */
    uint64_t stripe_stride; /* bytes from one stripe to the next */
    uint64_t stripe_bytes;  /* bytes of one stripe */
    uint64_t record_offset; /* expert roles: offset in each record, in bytes */
} matrix;

enum {
    MAX_HEAD_DIM = 1024, /* files with larger heads are rejected */
    UNIT = 32,           /* matrix rows in a unit, the smallest piece of work on a matrix */
    STRIPE_UNITS = 4     /* most units in a stripe */
};

typedef struct {
    cflow_header header;
    const cflow_layer *layers;           /* (n_layers,) */
    const cflow_tensor *tensors;         /* (n_tensors,) */
    const cflow_record *records;         /* (n_records,) */
    uint8_t *sections[CFLOW_N_SECTIONS]; /* the small sections; NULL for the banks */
    arena memory; /* resident bank, then the expert bank unless it is on disk (or their f32 form) */
    const uint8_t *expert_bank;
    matrix global[CFLOW_N_ROLES];    /* the tensors of CFLOW_MODEL_LEVEL */
    matrix (*blocks)[CFLOW_N_ROLES]; /* (n_blocks, roles); expert roles hold offsets, no data */
    const uint8_t **expert_data;     /* (n_records,) start of each record; NULL on disk */
    uint32_t *first_record;          /* (n_blocks + 1,) record index of each block's expert 0 */
    int header_only;                 /* 1: no weights were read */
    int as_f32;                      /* 1: held dequantised */
} model_weights;

static inline const cflow_layer *model_layer(const model_weights *m, uint32_t l) {
    return &m->layers[l];
}
/* The matrix of one role in layer l's block. */
static inline const matrix *model_matrix(const model_weights *m, uint32_t l, cflow_role role) {
    return &m->blocks[m->layers[l].block][role];
}
/* The matrix that turns the last norm into logits. */
static inline const matrix *head_matrix(const model_weights *m) {
    return &m->global[m->header.tied ? CFLOW_EMBEDDING : CFLOW_HEAD];
}
/* Index into `records` of expert e of layer l. */
static inline uint32_t model_record(const model_weights *m, uint32_t l, uint32_t e) {
    return m->first_record[m->layers[l].block] + e;
}

static inline const float *matrix_vector(const matrix *w) {
    return (const float *)(const void *)w->data;
}
static inline uint64_t matrix_bytes(const matrix *w) {
    return w->n_stripes * w->stripe_bytes;
}
static inline uint32_t stripe_units(const matrix *w) {
    return w->stripe_rows / UNIT;
}
static inline uint32_t matrix_units(const matrix *w) {
    return w->n_stripes * stripe_units(w);
}
static inline uint64_t matrix_unit_bytes(const matrix *w) {
    return w->stripe_bytes / stripe_units(w);
}
/* Matrix w of an expert role with its data in the record at `record`. */
static inline matrix matrix_in_record(const matrix *w, const uint8_t *record) {
    matrix in = *w;
    in.data = record + w->record_offset;
    return in;
}

#endif
