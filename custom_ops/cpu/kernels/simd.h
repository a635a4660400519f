// Float vectors of the instruction set this translation unit is compiled for.
//
// Every kernel file is compiled once per instruction set, each time with another FE_ISA (the name of
// the namespace it lands in) and other compiler flags. All helpers are static: a function with
// external linkage compiled for AVX-512 could be picked by the linker for the AVX2 kernels too and
// end an older machine with SIGILL. For the same reason kernels use no standard-library templates;
// setup_ops.py refuses a kernel object that defines a weak symbol.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#ifndef FE_ISA
#error "compile kernels through setup_ops.py, which sets FE_ISA"
#endif

#define FE_INLINE static inline __attribute__((always_inline, unused))

namespace fastengine {
namespace FE_ISA {

FE_INLINE int64_t min_i(int64_t a, int64_t b) { return a < b ? a : b; }
FE_INLINE int64_t max_i(int64_t a, int64_t b) { return a > b ? a : b; }
FE_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Vec = __m512;

FE_INLINE Vec vzero() { return _mm512_setzero_ps(); }
FE_INLINE Vec vset(float x) { return _mm512_set1_ps(x); }
FE_INLINE Vec vload(const float* p) { return _mm512_loadu_ps(p); }
FE_INLINE void vstore(float* p, Vec x) { _mm512_storeu_ps(p, x); }
FE_INLINE __mmask16 lane_mask(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
// The first n lanes (0 <= n <= kLanes); the others read as zero and are not written.
FE_INLINE Vec vload_n(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(lane_mask(n), p); }
FE_INLINE void vstore_n(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, lane_mask(n), x); }
// The first n lanes of x, `other` in the rest.
FE_INLINE Vec vkeep_n(Vec x, int64_t n, Vec other) { return _mm512_mask_blend_ps(lane_mask(n), other, x); }
FE_INLINE Vec vload_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
FE_INLINE Vec vadd(Vec a, Vec b) { return _mm512_add_ps(a, b); }
FE_INLINE Vec vsub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
FE_INLINE Vec vmul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
FE_INLINE Vec vdiv(Vec a, Vec b) { return _mm512_div_ps(a, b); }
FE_INLINE Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
// b where a is NaN.
FE_INLINE Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
FE_INLINE Vec vfma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
FE_INLINE float vsum(Vec x) { return _mm512_reduce_add_ps(x); }
FE_INLINE float vmaximum(Vec x) { return _mm512_reduce_max_ps(x); }
// Bit i is set where a[i] >= b[i] (never for NaN).
FE_INLINE uint32_t vge_bits(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
FE_INLINE uint32_t vgt_bits(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
// x * 2^k for integral k in [-126, 127].
FE_INLINE Vec vscale_exp2(Vec x, Vec k) {
  const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(k), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(x, _mm512_castsi512_ps(bits));
}
FE_INLINE Vec vround(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int kLanes = 8;
using Vec = __m256;

FE_INLINE Vec vzero() { return _mm256_setzero_ps(); }
FE_INLINE Vec vset(float x) { return _mm256_set1_ps(x); }
FE_INLINE Vec vload(const float* p) { return _mm256_loadu_ps(p); }
FE_INLINE void vstore(float* p, Vec x) { _mm256_storeu_ps(p, x); }
FE_INLINE __m256i lane_mask(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
// Whole vectors are the rule.
FE_INLINE Vec vload_n(const float* p, int64_t n) { return n == kLanes ? vload(p) : _mm256_maskload_ps(p, lane_mask(n)); }
// Where it can without a mask: AMD's processors take 15 cycles for a store with one, whatever is in it.
FE_INLINE void vstore_n(float* p, Vec x, int64_t n) {
  if (n >= kLanes) {
    vstore(p, x);
  } else if (__builtin_constant_p(n)) {
    __m128 part = _mm256_castps256_ps128(x);
    if (n & 4) _mm_storeu_ps(p, part), part = _mm256_extractf128_ps(x, 1), p += 4;
    if (n & 2) _mm_storel_pi(reinterpret_cast<__m64*>(p), part), part = _mm_movehl_ps(part, part), p += 2;
    if (n & 1) _mm_store_ss(p, part);
  } else {
    _mm256_maskstore_ps(p, lane_mask(n), x);
  }
}
FE_INLINE Vec vkeep_n(Vec x, int64_t n, Vec other) { return n == kLanes ? x : _mm256_blendv_ps(other, x, _mm256_castsi256_ps(lane_mask(n))); }
FE_INLINE Vec vload_bf16(const uint16_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
FE_INLINE Vec vadd(Vec a, Vec b) { return _mm256_add_ps(a, b); }
FE_INLINE Vec vsub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
FE_INLINE Vec vmul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
FE_INLINE Vec vdiv(Vec a, Vec b) { return _mm256_div_ps(a, b); }
FE_INLINE Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }
FE_INLINE Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
FE_INLINE Vec vfma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
FE_INLINE float vsum(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
FE_INLINE float vmaximum(Vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
FE_INLINE uint32_t vge_bits(Vec a, Vec b) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
FE_INLINE uint32_t vgt_bits(Vec a, Vec b) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
FE_INLINE Vec vscale_exp2(Vec x, Vec k) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
FE_INLINE Vec vround(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#else
#error "kernels need AVX2 with FMA, or AVX-512"
#endif

// The sums of four vectors' lanes, as four floats.
FE_INLINE __m128 vsum4(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const Vec sums = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
#else
  const Vec ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d lo = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256d hi = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256 half = _mm256_add_ps(_mm256_castpd_ps(lo), _mm256_castpd_ps(hi));
#endif
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// e^x to about 2 units in the last place. Below -87 it returns 0 (no denormals, and -inf is safe);
// above 88 it saturates instead of overflowing.
FE_INLINE Vec vexp(Vec x) {
  const Vec low = vset(-87.0f);
  const Vec clamped = vmin(vmax(x, low), vset(88.0f));
  const Vec k = vround(vmul(clamped, vset(1.44269504088896341f)));
  Vec r = vfma(k, vset(-0.693359375f), clamped);
  r = vfma(k, vset(2.12194440e-4f), r);
  Vec p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vadd(vfma(p, vmul(r, r), r), vset(1.0f));
  const Vec result = vscale_exp2(p, k);
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(vgt_bits(x, low)), result);
#else
  return _mm256_and_ps(result, _mm256_cmp_ps(x, low, _CMP_GT_OQ));
#endif
}

FE_INLINE float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  __builtin_memcpy(&out, &bits, sizeof(out));
  return out;
}

// Round to nearest even; a NaN stays a (quiet) NaN.
FE_INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

FE_INLINE Vec load_as_float(const float* p) { return vload(p); }
FE_INLINE Vec load_as_float(const uint16_t* p) { return vload_bf16(p); }
// The first n values (n <= kLanes), zeros after them; never reads past them.
FE_INLINE Vec load_as_float_n(const float* p, int64_t n) { return vload_n(p, n); }
FE_INLINE Vec load_as_float_n(const uint16_t* p, int64_t n) {
  uint16_t padded[kLanes] = {};
  __builtin_memcpy(padded, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return vload_bf16(padded);
}
FE_INLINE float to_float(float x) { return x; }
FE_INLINE float to_float(uint16_t x) { return bf16_to_float(x); }
FE_INLINE void from_float(float x, float* out) { *out = x; }
FE_INLINE void from_float(float x, uint16_t* out) { *out = float_to_bf16(x); }

}  // namespace FE_ISA
}  // namespace fastengine
