/* AVX-512 (F, BW, VL, DQ) with VNNI: a vector is a whole group of 16 rows. */
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdalign.h>
#include <string.h>

#include "../kernels.h"

#define INLINE inline __attribute__((always_inline))
#define LANES 16
#define UNITS 2
#define HEADS 4
#define NIBBLE_BIAS 8
#define BYTE_BIAS 128

typedef __m512 vf;
typedef __m512i vi;

/* Activations are stored once: instructions broadcast them to all lanes. */
typedef float xf;
typedef int32_t xi;

static INLINE __mmask16 first_lanes(uint32_t n) {
    return (__mmask16)(n >= LANES ? 0xffff : (1u << n) - 1);
}

static INLINE vf f_set1(float x) {
    return _mm512_set1_ps(x);
}
static INLINE vf f_load(const float *p) {
    return _mm512_loadu_ps(p);
}
static INLINE void f_store(float *p, vf v) {
    _mm512_storeu_ps(p, v);
}
static INLINE vf f_load_n(const float *p, uint32_t n) {
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
static INLINE void f_store_n(float *p, vf v, uint32_t n) {
    _mm512_mask_storeu_ps(p, first_lanes(n), v);
}
static INLINE vf f_first_n(vf v, uint32_t n) {
    return _mm512_maskz_mov_ps(first_lanes(n), v);
}
static INLINE float f_first(vf v) {
    return _mm512_cvtss_f32(v);
}
static INLINE vf f_fma(vf a, vf b, vf c) {
    return _mm512_fmadd_ps(a, b, c);
}
static INLINE vf f_max(vf a, vf b) {
    return _mm512_max_ps(a, b);
}
static INLINE vf f_min(vf a, vf b) {
    return _mm512_min_ps(a, b);
}
static INLINE int f_has_nan(vf v) {
    return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0;
}
static INLINE float f_reduce_max(vf v) {
    return _mm512_reduce_max_ps(v);
}
static INLINE vf f_of_int(vi v) {
    return _mm512_cvtepi32_ps(v);
}
static INLINE vi f_round(vf v) {
    return _mm512_cvtps_epi32(v);
}
static INLINE vi f_magnitude(vf v) {
    return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
}

static INLINE vf f_of_f32(const uint8_t *p) {
    return _mm512_loadu_ps(p);
}
static INLINE vf f_of_f16(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static INLINE vf f_of_bf16(const uint8_t *p) {
    const vi wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static INLINE void f_store_f16(uint16_t *p, vf v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

static INLINE vi i_load(const uint8_t *p) {
    return _mm512_loadu_si512(p);
}
static INLINE vi i_or(vi a, vi b) {
    return _mm512_or_si512(a, b);
}
static INLINE vi i_max(vi a, vi b) {
    return _mm512_max_epi32(a, b);
}
static INLINE int32_t i_reduce_max(vi v) {
    return _mm512_reduce_max_epi32(v);
}
static INLINE int32_t i_reduce_add(vi v) {
    return _mm512_reduce_add_epi32(v);
}
static INLINE vi i_of_u8(const uint8_t *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
static INLINE vi i_of_i8(const uint8_t *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
static INLINE void i_store_i8(int8_t *p, vi v) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(v));
}

/* The 16-lane sum of kernels.h. */
static INLINE float fold16(const vf sum[1]) {
    const __m256 eight = _mm512_castps512_ps256(sum[0]) + _mm512_extractf32x8_ps(sum[0], 1);
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* One rounding, as with the two factors of scalar.c: p is in [0.7, 1.5]. */
static INLINE vf times_power_of_2(vf p, vf k, vf shifted) {
    (void)shifted;
    return _mm512_scalef_ps(p, k);
}

static INLINE vi low_nibbles(vi v) {
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
}
static INLINE vi high_nibbles(vi v) {
    return low_nibbles(_mm512_srli_epi16(v, 4));
}
static INLINE vi byte_codes(vi v) {
    return v;
}

/* Bits 2 k and 2 k + 1 of every byte, at bits 4 and 5. */
static INLINE vi upper_pair(vi v, int k) {
    const vi mask = _mm512_set1_epi8(0x30);
    if (k == 0) return _mm512_and_si512(_mm512_slli_epi16(v, 4), mask);
    if (k == 1) return _mm512_and_si512(_mm512_slli_epi16(v, 2), mask);
    if (k == 2) return _mm512_and_si512(v, mask);
    return _mm512_and_si512(_mm512_srli_epi16(v, 2), mask);
}

static INLINE xi spread_four(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return four;
}
static INLINE xi spread_i(int32_t x) {
    return x;
}
static INLINE xf spread_f(float x) {
    return x;
}
static INLINE vi i_of_x(xi x) {
    return _mm512_set1_epi32(x);
}
static INLINE vf f_of_x(xf x) {
    return _mm512_set1_ps(x);
}

static INLINE void dot_quads(vi out[UNITS], const vi w[UNITS][8], int first, int n, const xi *x,
                             xi start) {
    for (int u = 0; u < UNITS; u++) out[u] = i_of_x(start);
    for (int j = 0; j < n; j++) {
        const vi four = i_of_x(x[j]);
        for (int u = 0; u < UNITS; u++) out[u] = _mm512_dpbusd_epi32(out[u], w[u][first + j], four);
    }
}
static INLINE void dot_nibbles(vi out[UNITS], const vi w[UNITS][8], const xi *x, xi start) {
    dot_quads(out, w, 0, 8, x, start);
}
static INLINE void dot_bytes(vi out[UNITS], const vi w[UNITS][8], const xi *x, xi start) {
    dot_quads(out, w, 0, 8, x, start);
}
static INLINE void dot_sixes(vi out[UNITS], const vi w[UNITS][8], int first, const xi *x,
                             xi start) {
    dot_quads(out, w, first, 4, x, start);
}

#include "lanes.h"

void kernels_init_avx512vnni(kernels *k) {
    lanes_fill(k);
}
