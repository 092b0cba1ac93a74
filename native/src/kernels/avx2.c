/* AVX2 with FMA, F16C and SSE4.2: a vector is half a group of 16 rows. */
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <stdalign.h>
#include <string.h>

#include "../kernels.h"

#define INLINE inline __attribute__((always_inline))
#define LANES 8
#define UNITS 1
#define HEADS 3
#define NIBBLE_BIAS (8 << 16)
#define BYTE_BIAS 0

typedef __m256 vf;
typedef __m256i vi;

/* Activations are stored once for every lane: as memory operands they need no extra instruction. */
typedef vf xf;
typedef vi xi;

static INLINE vi first_lanes(uint32_t n) {
    const vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n > LANES ? LANES : (int32_t)n), lane);
}

static INLINE vf f_set1(float x) {
    return _mm256_set1_ps(x);
}
static INLINE vf f_load(const float *p) {
    return _mm256_loadu_ps(p);
}
static INLINE void f_store(float *p, vf v) {
    _mm256_storeu_ps(p, v);
}
static INLINE vf f_load_n(const float *p, uint32_t n) {
    return n >= LANES ? f_load(p) : _mm256_maskload_ps(p, first_lanes(n));
}
static INLINE void f_store_n(float *p, vf v, uint32_t n) {
    if (n >= LANES) {
        f_store(p, v);
    } else {
        _mm256_maskstore_ps(p, first_lanes(n), v);
    }
}
static INLINE vf f_first_n(vf v, uint32_t n) {
    return _mm256_and_ps(v, _mm256_castsi256_ps(first_lanes(n)));
}
static INLINE float f_first(vf v) {
    return _mm256_cvtss_f32(v);
}
static INLINE vf f_fma(vf a, vf b, vf c) {
    return _mm256_fmadd_ps(a, b, c);
}
static INLINE vf f_max(vf a, vf b) {
    return _mm256_max_ps(a, b);
}
static INLINE vf f_min(vf a, vf b) {
    return _mm256_min_ps(a, b);
}
static INLINE int f_has_nan(vf v) {
    return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0;
}
static INLINE float f_reduce_max(vf v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
static INLINE vf f_of_int(vi v) {
    return _mm256_cvtepi32_ps(v);
}
static INLINE vi f_round(vf v) {
    return _mm256_cvtps_epi32(v);
}
static INLINE vi f_magnitude(vf v) {
    return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
}

static INLINE vf f_of_f32(const uint8_t *p) {
    return _mm256_loadu_ps((const float *)(const void *)p);
}
static INLINE vf f_of_f16(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static INLINE vf f_of_bf16(const uint8_t *p) {
    const vi wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static INLINE void f_store_f16(uint16_t *p, vf v) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

static INLINE vi i_load(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}
static INLINE vi i_or(vi a, vi b) {
    return _mm256_or_si256(a, b);
}
static INLINE vi i_max(vi a, vi b) {
    return _mm256_max_epi32(a, b);
}
static INLINE int32_t i_reduce_max(vi v) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
static INLINE int32_t i_reduce_add(vi v) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
static INLINE vi i_of_u8(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static INLINE vi i_of_i8(const uint8_t *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static INLINE void i_store_i8(int8_t *p, vi v) {
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}

/* The 16-lane sum of kernels.h. */
static INLINE float fold16(const vf sum[2]) {
    const vf eight = sum[0] + sum[1];
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static INLINE vf power_of_2(vi k) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(k, _mm256_set1_epi32(127)), 23));
}
static INLINE vf times_power_of_2(vf p, vf k, vf shifted) {
    (void)k;
    const vi zero = _mm256_castps_si256(f_set1(0x1.8p+23f));
    const vi power = _mm256_sub_epi32(_mm256_castps_si256(shifted), zero);
    const vi half = _mm256_srai_epi32(power, 1);
    return p * power_of_2(half) * power_of_2(_mm256_sub_epi32(power, half));
}

static INLINE vi low_nibbles(vi v) {
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}
static INLINE vi high_nibbles(vi v) {
    return low_nibbles(_mm256_srli_epi16(v, 4));
}
static INLINE vi byte_codes(vi v) {
    return _mm256_xor_si256(v, _mm256_set1_epi8(-128));
}

/* Bits 2 k and 2 k + 1 of every byte, at bits 4 and 5. */
static INLINE vi upper_pair(vi v, int k) {
    const vi mask = _mm256_set1_epi8(0x30);
    if (k == 0) return _mm256_and_si256(_mm256_slli_epi16(v, 4), mask);
    if (k == 1) return _mm256_and_si256(_mm256_slli_epi16(v, 2), mask);
    if (k == 2) return _mm256_and_si256(v, mask);
    return _mm256_and_si256(_mm256_srli_epi16(v, 2), mask);
}

static INLINE xi spread_four(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
static INLINE xi spread_i(int32_t x) {
    return _mm256_set1_epi32(x);
}
static INLINE xf spread_f(float x) {
    return _mm256_set1_ps(x);
}
static INLINE vf f_of_x(xf x) {
    return x;
}
static INLINE vi pair_sums(vi words) {
    return _mm256_madd_epi16(words, _mm256_set1_epi16(1));
}

/* Sums stay in 16-bit words: eight pairs of products are at most 15 * 127 * 16. `start` holds the
 * bias in every other word; with it, at most 8 * 127 * 32, the sums still fit. */
static INLINE void dot_nibbles(vi out[UNITS], const vi w[UNITS][8], const xi *x, xi start) {
    for (int j = 0; j < 8; j++) {
        start = _mm256_add_epi16(start, _mm256_maddubs_epi16(w[0][j], x[j]));
        __asm__("" : "+x"(start)); /* else gcc computes all products first and spills w */
    }
    out[0] = pair_sums(start);
}

/* Codes are signed here: a pair of |w| * (x with the sign of w) stays below 2^15 even for w = -128,
 * whereas unsigned codes times x would saturate. */
static INLINE void dot_bytes(vi out[UNITS], const vi w[UNITS][8], const xi *x, xi start) {
    for (int j = 0; j < 8; j++) {
        const vi signed_x = _mm256_sign_epi8(x[j], w[0][j]);
        const vi words = _mm256_maddubs_epi16(_mm256_abs_epi8(w[0][j]), signed_x);
        start = _mm256_add_epi32(start, pair_sums(words));
    }
    out[0] = start;
}

/* A pair of products is at most 63 * 127 * 2, so two pairs fit into a signed 16-bit word. */
static INLINE void dot_sixes(vi out[UNITS], const vi w[UNITS][8], int first, const xi *x,
                             xi start) {
    out[0] = start;
    for (int j = 0; j < 4; j += 2) {
        const vi words = _mm256_add_epi16(_mm256_maddubs_epi16(w[0][first + j], x[j]),
                                          _mm256_maddubs_epi16(w[0][first + j + 1], x[j + 1]));
        out[0] = _mm256_add_epi32(out[0], pair_sums(words));
    }
}

#include "lanes.h"

static INLINE uint64_t u64_at(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

/* Three streams of CRC_RUN bytes hide the latency of the crc32 instruction. Their CRCs are joined
 * by multiplying with CRC_SHIFT = x^(8 CRC_RUN). */
#define CRC_RUN 16384
#define CRC_SHIFT 0xbf455269

static uint32_t crc_three_runs(uint32_t crc, const uint8_t *p) {
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < CRC_RUN; i += 8) {
        a = _mm_crc32_u64(a, u64_at(p + i));
        b = _mm_crc32_u64(b, u64_at(p + CRC_RUN + i));
        c = _mm_crc32_u64(c, u64_at(p + 2 * CRC_RUN + i));
    }
    const uint32_t ab = crc_multiply((uint32_t)a, CRC_SHIFT) ^ (uint32_t)b;
    return crc_multiply(ab, CRC_SHIFT) ^ (uint32_t)c;
}

static uint32_t crc32c(uint32_t crc, const void *data, size_t bytes) {
    const uint8_t *p = data;
    crc = ~crc;
    for (; bytes >= 3 * CRC_RUN; bytes -= 3 * CRC_RUN, p += 3 * CRC_RUN)
        crc = crc_three_runs(crc, p);
    for (; bytes >= 8; bytes -= 8, p += 8) crc = (uint32_t)_mm_crc32_u64(crc, u64_at(p));
    for (; bytes > 0; bytes--, p++) crc = _mm_crc32_u8(crc, *p);
    return ~crc;
}

void kernels_init_avx2(kernels *k) {
    lanes_fill(k);
    k->crc32c = crc32c;
}
