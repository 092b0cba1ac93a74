/* A loaded model file: headers, and where every weight lies in memory. Immutable once open, but for
 * what comes from disk (tier.h, ring.h). */
#ifndef CFLOW_MODEL_H
#define CFLOW_MODEL_H

#include <stdatomic.h>

#include "arena.h"
#include "cflow.h"
#include "tier.h"

/* Stands for data that exists in the file but not in memory (header_only): not NULL, never read. */
#define WEIGHTS_ELSEWHERE ((const uint8_t *)64)

/* A matrix in stripes, or (stripe_rows 0) a vector of n_cols floats. data NULL: not in the file. */
typedef struct {
    const uint8_t *data;
    uint32_t encoding;
    uint32_t n_rows, n_cols;
    uint32_t stripe_rows;
    uint32_t n_stripes;
    uint32_t n_blocks;      /* 32-column blocks in a stripe, padding included */
    uint64_t stripe_stride; /* from a stripe to the next */
    uint64_t stripe_bytes;  /* of one stripe */
    uint64_t record_offset; /* expert roles: where it starts in each record */
} matrix;

enum { MAX_HEAD_DIM = 1024 }; /* a file with more is refused */

typedef struct plan plan;
typedef struct ring ring;

struct cflow_model {
    cflow_header header;
    const cflow_layer *layers;           /* (n_layers,) */
    const cflow_tensor *tensors;         /* (n_tensors,) */
    const cflow_record *records;         /* (n_records,) */
    uint8_t *sections[CFLOW_N_SECTIONS]; /* the small sections, NULL for the banks */
    arena weights; /* resident bank, then expert bank unless it is on disk (or their f32 form) */
    const uint8_t *expert_bank;
    matrix global[CFLOW_N_ROLES];    /* the tensors of CFLOW_MODEL_LEVEL */
    matrix (*blocks)[CFLOW_N_ROLES]; /* (n_blocks, roles); the expert roles hold offsets only */
    const uint8_t **expert_data;     /* (n_records,) start of each record in memory; NULL on disk */
    uint32_t *first_record;          /* (n_blocks + 1,) index of a block's expert 0 in records */
    plan *plan;
    tier *tier; /* NULL: every record is in memory */
    ring *ring; /* NULL: all of the resident bank is; else `data` of what comes and goes is good
                   while pinned */
    cflow_memory memory;
    int header_only, as_f32;
    int speculate;  /* 1: the plan guesses the next layer's experts */
    uint32_t defer; /* experts of a token that land a layer late */
    cflow_window window;
    uint32_t most_pinned; /* records a step may pin while it waits for others */
    atomic_int n_holders; /* who opened it, and its contexts */
    atomic_int is_taken;  /* by its context, where it has one only */
};

static inline const cflow_layer *model_layer(const cflow_model *m, uint32_t l) {
    return &m->layers[l];
}
/* A tensor of layer l's block. */
static inline const matrix *model_matrix(const cflow_model *m, uint32_t l, cflow_role role) {
    return &m->blocks[m->layers[l].block][role];
}
static inline const float *matrix_vector(const matrix *w) {
    return (const float *)(const void *)w->data;
}
/* Expert e of layer l, as an index into records. */
static inline uint32_t model_record(const cflow_model *m, uint32_t l, uint32_t e) {
    return m->first_record[m->layers[l].block] + e;
}
/* What matrix w of an expert role is in the record that lies at `record`. For these roles
 * blocks[][role].data is NULL. */
static inline matrix matrix_in_record(const matrix *w, const uint8_t *record) {
    matrix in = *w;
    in.data = record + w->record_offset;
    return in;
}
/* The status of whoever needs a record that failed. */
static inline cflow_status record_status(tier_result result) {
    return result == TIER_CUT || result == TIER_ALTERED ? CFLOW_EFORMAT : CFLOW_EIO;
}

/* Until one more cflow_model_close. */
void model_hold(const cflow_model *m);

/* How records are read. */
tier_options tier_options_of(const cflow_model_options *options, uint64_t budget_bytes,
                             const tier_hooks *hooks);

/* cflow_model_open; hooks: how records are read, NULL for as usual. */
cflow_status model_open(cflow_model **out, const cflow_model_options *options,
                        const tier_hooks *hooks, cflow_error *err);

#endif
