/* The ops on whole rows and whole matrices, and the products they share with experts and head. */
#ifndef CFLOW_OPS_H
#define CFLOW_OPS_H

#include "ctx.h"

enum { GATED_ROWS = 64 }; /* rows whose gate and up outputs a thread holds at once */

/* A run of equal units of one op. forward.c divides the spans of a phase among the threads. */
typedef struct {
    uint32_t units;
    uint64_t cost;   /* of one unit, in weight bytes times rows */
    uint32_t stripe; /* units in a stripe; 0: they belong to none */
} span;

static inline span matrix_span(const matrix *w, uint64_t cost) {
    return (span){matrix_units(w), cost, stripe_units(w)};
}

/* Of OP_GATED, for m rows. */
static inline span gated_span(const gated_weights *w, uint32_t m) {
    const uint64_t gate = w->gate ? matrix_unit_bytes(w->gate) : 0;
    return matrix_span(w->up, m * (gate + matrix_unit_bytes(w->up)));
}

/* y = W x, for units [first, end) of w and m rows. x_rows, y_rows (m,): which rows of x and y, NULL
 * for 0 .. m - 1. y points at the column of unit `first`; y_ld floats from a row to the next. */
void multiply(const cflow_ctx *ctx, const matrix *w, uint32_t first, uint32_t end, activations x,
              const int32_t *x_rows, uint32_t m, const int32_t *y_rows, float *y, size_t y_ld);
/* hidden = act(gate x) * (up x), for units [first, end) and m rows as in multiply; also as codes
 * where `hidden` has them. */
void multiply_gated(const cflow_ctx *ctx, const cflow_layer *l, gated_weights w, uint32_t first,
                    uint32_t end, activations x, const int32_t *x_rows, uint32_t m,
                    const int32_t *y_rows, const buffer *hidden, int thread);
/* Completes columns [column, column + n) of a row, just written, for the matrix that multiplies
 * them: zeroes the columns up to the next multiple of 32, and makes the codes where b has them. */
void buffer_finish(const cflow_ctx *ctx, const buffer *b, size_t row, size_t column, uint32_t n);

/* Units [first, end) of OP_MATMUL's piece `one`, and of OP_GATED; one row of OP_COMBINE. */
void matmul_run(const cflow_ctx *ctx, const op *o, const piece *one, uint32_t first, uint32_t end);
void gated_run(const cflow_ctx *ctx, const op *o, uint32_t first, uint32_t end, int thread);
void combine_row(const cflow_ctx *ctx, const op *o, uint32_t row);

#endif
