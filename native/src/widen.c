#include "widen.h"

#include <string.h>

#include "kernels.h"
#include "kernels/layout.h"
#include "tensors.h"

typedef struct {
    const model_weights *m;
    const uint8_t *resident, *bank; /* the two banks as stored */
    uint8_t *out;                   /* m->memory */
    float *rows;                    /* (n_threads, widest) one dequantised row each */
    uint32_t widest;                /* columns of the widest matrix */
    int n_threads;
} widener;

static void widen_shape(matrix *w) {
    if (!w->stripe_rows) return;
    w->encoding = CFLOW_F32;
    w->n_blocks = n_column_blocks(CFLOW_F32, w->n_cols);
    w->stripe_bytes = w->stripe_stride = stripe_bytes(CFLOW_F32, w->stripe_rows, w->n_cols);
}

void widen_shapes(model_weights *m) {
    for (uint32_t i = 0; i < m->header.n_tensors; i++) widen_shape(tensor_entry(m, &m->tensors[i]));
    for (uint32_t b = 0; b < m->header.n_blocks; b++) {
        matrix *gate = &m->blocks[b][CFLOW_EXPERT_GATE]; /* then up, then down */
        gate[0].record_offset = 0;
        gate[1].record_offset = matrix_bytes(&gate[0]);
        gate[2].record_offset = gate[1].record_offset + matrix_bytes(&gate[1]);
    }
}

static uint64_t widened_record_bytes(const model_weights *m, uint32_t block) {
    const matrix *down = &m->blocks[block][CFLOW_EXPERT_DOWN];
    return down->record_offset + matrix_bytes(down);
}

/* Dequantises stripe s of tensor t, whose bank or record is at `from`, into matrix w at `to`. */
static void widen_stripe(const cflow_tensor *t, const matrix *w, uint32_t s, const uint8_t *from,
                         uint8_t *to, float *row) {
    const uint8_t *stripe = from + t->offset + s * t->stripe_stride;
    uint8_t *out = to + s * w->stripe_stride;
    const uint32_t groups = w->stripe_rows / 16, first = s * w->stripe_rows;
    for (uint32_t r = 0; r < w->stripe_rows && first + r < w->n_rows; r++) {
        stripe_row(t->encoding, stripe, t->stripe_rows, t->n_cols, r, row);
        for (uint32_t c = 0; c < t->n_cols; c++)
            memcpy(out + block_start(CFLOW_F32, groups, c / 32) + 4 * float_index(r, c % 32),
                   &row[c], sizeof row[c]);
    }
}

/* A writable pointer to `data`, which is in m->memory. */
static uint8_t *place_of(const widener *v, const uint8_t *data) {
    return v->out + (data - v->out);
}

/* A thread's part: every n_threads-th stripe of the resident bank, every n_threads-th record. */
static void widen_share(void *arg, int thread) {
    const widener *v = arg;
    const model_weights *m = v->m;
    float *row = v->rows + (size_t)thread * v->widest;
    const uint32_t first = (uint32_t)thread, stride = (uint32_t)v->n_threads;
    for (uint32_t i = 0; i < m->header.n_tensors; i++) {
        const cflow_tensor *t = &m->tensors[i];
        const matrix *w = tensor_matrix(m, t);
        if (tensor_is_expert(t)) {
            for (uint32_t r = m->first_record[t->block] + first; r < m->first_record[t->block + 1];
                 r += stride)
                for (uint32_t s = 0; s < w->n_stripes; s++)
                    widen_stripe(t, w, s, v->bank + m->records[r].offset,
                                 place_of(v, m->expert_data[r]) + w->record_offset, row);
        } else if (w->stripe_rows) {
            for (uint32_t s = first; s < w->n_stripes; s += stride)
                widen_stripe(t, w, s, v->resident, place_of(v, w->data), row);
        } else if (thread == 0) {
            memcpy(place_of(v, w->data), v->resident + t->offset, w->stripe_bytes);
        }
    }
}

static uint64_t widened_bytes(const model_weights *m) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < m->header.n_tensors; i++)
        if (!tensor_is_expert(&m->tensors[i]))
            bytes += arena_size(matrix_bytes(tensor_matrix(m, &m->tensors[i])));
    for (uint32_t i = 0; i < m->header.n_records; i++)
        bytes += widened_record_bytes(m, m->records[i].block);
    return bytes;
}

/* Gives every matrix and record its place in the new arena, in the order of the tables. */
static void place_widened(model_weights *m) {
    for (uint32_t i = 0; i < m->header.n_tensors; i++) {
        matrix *w = tensor_entry(m, &m->tensors[i]);
        if (!tensor_is_expert(&m->tensors[i])) w->data = arena_take(&m->memory, matrix_bytes(w));
    }
    for (uint32_t i = 0; i < m->header.n_records; i++)
        m->expert_data[i] = arena_take(&m->memory, widened_record_bytes(m, m->records[i].block));
    m->expert_bank = m->header.n_records ? m->expert_data[0] : NULL;
}

static uint32_t widest(const model_weights *m) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->header.n_tensors; i++)
        if (m->tensors[i].n_cols > n) n = m->tensors[i].n_cols;
    return n;
}

cflow_status widen_weights(model_weights *m, pool *threads, cflow_error *err) {
    arena stored = m->memory;
    widener v = {.m = m,
                 .resident = stored.base,
                 .bank = m->expert_bank,
                 .widest = widest(m),
                 .n_threads = pool_threads(threads)};
    widen_shapes(m);
    arena rows = {0};
    m->memory = (arena){0};
    cflow_status s = arena_open(&rows, (size_t)v.n_threads * v.widest * sizeof *v.rows,
                                "rows that are dequantised", err);
    if (!s) s = arena_open(&m->memory, widened_bytes(m), "the weights as f32", err);
    if (!s) {
        v.rows = arena_take(&rows, rows.bytes);
        v.out = m->memory.base;
        place_widened(m);
        pool_run(threads, widen_share, &v);
    }
    arena_close(&rows);
    arena_close(&stored);
    return s;
}
