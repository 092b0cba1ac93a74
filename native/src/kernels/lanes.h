/* The kernels for any instruction set whose vectors have LANES floats.
 *
 * The including file first defines
 *   vf, vi          vectors of LANES floats; of LANES int32, or 4 LANES bytes
 *   LANES           8 or 16
 *   UNITS           vectors of weights multiplied with an activation at a time (8 registers each)
 *   HEADS           attention heads that share loads of K and V
 *   NIBBLE_BIAS     the bias of q4_0, in the unit of a dot's `start`
 *   BYTE_BIAS       the part of q8's bias that byte_codes leaves, in the same unit
 *   xf, xi          the memory form of a float, and of an int32 or 4 codes, of x for all lanes
 * and, as static INLINE, the f_ and i_ operations used in the three files below, and the dots,
 * which add exact integer products to `start`; w[u][j] and x[j] hold columns 4 j to 4 j + 3:
 *   dot_nibbles, dot_bytes(out, w, x, start)   over 32 columns
 *   dot_sixes(out, w, first, x, start)         over 16 columns, from w[u][first] on
 */
#ifndef CFLOW_LANES_H
#define CFLOW_LANES_H

typedef void (*dot_fn)(vi out[UNITS], const vi w[UNITS][8], const xi *x, xi start);

#include "lanes_matmul.h"
#include "lanes_vector.h"

#include "lanes_attend.h"

static void lanes_fill(kernels *k) {
    k->matmul[CFLOW_F32] = matmul_f32;
    k->matmul[CFLOW_F16] = matmul_f16;
    k->matmul[CFLOW_BF16] = matmul_bf16;
    k->matmul[CFLOW_Q4_0] = matmul_q4_0;
    k->matmul[CFLOW_Q4_1] = matmul_q4_1;
    k->matmul[CFLOW_Q8_0] = matmul_q8_0;
    k->matmul[CFLOW_Q8_1] = matmul_q8_1;
    k->matmul[CFLOW_Q4_K] = matmul_q4_k;
    k->matmul[CFLOW_Q6_K] = matmul_q6_k;
    k->quantize = quantize;
    k->sum_squares = sum_squares;
    k->scale_weight = scale_weight;
    k->add_scaled = add_scaled;
    k->gated = gated;
    k->attend = attend;
    k->max = maximum;
    k->sum_exp = sum_exp;
    k->exp_shifted = exp_shifted;
    k->f32_to_f16 = f32_to_f16;
}

#endif
