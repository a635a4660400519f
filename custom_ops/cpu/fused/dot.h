// Dot products: of unsigned weights and signed activations, and of pairs of 16-bit integers.
//
// An IVec holds one int32 sum per column; its weights operand holds four k's of each column.
#pragma once

#include "activations.h"

namespace fastengine {
namespace FE_ISA {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define FE_HAS_DOTS  // as one instruction
#endif

#if defined(__AVX512F__)
using IVec = __m512i;
FE_INLINE IVec iset(int32_t x) { return _mm512_set1_epi32(x); }
FE_INLINE IVec iload(const void* p) { return _mm512_loadu_si512(p); }
FE_INLINE void istore(void* p, IVec x) { _mm512_storeu_si512(p, x); }
FE_INLINE Vec to_floats(IVec x) { return _mm512_cvtepi32_ps(x); }
// Two integers of 16 bits in each lane, `low` first.
FE_INLINE IVec in_pairs(Vec low, Vec high) {
  return _mm512_or_si512(_mm512_and_si512(_mm512_cvtps_epi32(low), _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(_mm512_cvtps_epi32(high), 16));
}
FE_INLINE void istore_n(int32_t* p, IVec x, int64_t n) { _mm512_mask_storeu_epi32(p, lane_mask(n), x); }
#else
using IVec = __m256i;
FE_INLINE IVec iset(int32_t x) { return _mm256_set1_epi32(x); }
FE_INLINE IVec iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
FE_INLINE void istore(void* p, IVec x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
FE_INLINE Vec to_floats(IVec x) { return _mm256_cvtepi32_ps(x); }
FE_INLINE IVec in_pairs(Vec low, Vec high) {
  return _mm256_blend_epi16(_mm256_cvtps_epi32(low), _mm256_slli_epi32(_mm256_cvtps_epi32(high), 16), 0xaa);
}
FE_INLINE void istore_n(int32_t* p, IVec x, int64_t n) { vstore_n(reinterpret_cast<float*>(p), _mm256_castsi256_ps(x), n); }
#endif

#if defined(__AVX512F__)
FE_INLINE IVec bytes_and(IVec x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask))); }
FE_INLINE IVec bytes_as_integers(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
FE_INLINE IVec shift_right_4(IVec x) { return _mm512_srli_epi32(x, 4); }
#else
FE_INLINE IVec bytes_and(IVec x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }
FE_INLINE IVec bytes_as_integers(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
FE_INLINE IVec shift_right_4(IVec x) { return _mm256_srli_epi32(x, 4); }
#endif

// The steps of a group's first or second block, of as many columns as a Vec has lanes.
FE_INLINE IVec steps_of(const uint8_t* steps, int64_t half) {
  const IVec both = bytes_as_integers(steps);
  return half == 0 ? bytes_and(both, 15) : shift_right_4(both);
}

// As many float16 as a Vec has lanes.
FE_INLINE Vec halves(const uint8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
}

#if defined(FE_HAS_DOTS)
// sums += weights (u8) . values (s8), exact. Inline assembly, as compilers copy accumulators around the intrinsic and spill.
FE_INLINE void add_dots(IVec& sums, IVec weights, IVec values) {
#if defined(FE_EMULATED)
  sums = fe_dot_bytes(sums, weights, values);
#elif defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(values));
#else
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(values));
#endif
}

// Of kVecs vectors of columns, with one row's four values.
template <int kVecs>
FE_INLINE void add_dots_of(IVec (&sums)[kVecs], const IVec (&weights)[kVecs], const int32_t* values) {
#if defined(__AVX512VNNI__) && !defined(FE_EMULATED)
  // Spread by each instruction for itself: loads are plenty, and a GEMM of many rows is a tenth faster without one more to issue.
  for (int u = 0; u < kVecs; ++u) asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[u]) : "v"(weights[u]), "m"(*values));
#else
  const IVec spread = iset(*values);
  for (int u = 0; u < kVecs; ++u) add_dots(sums[u], weights[u], spread);
#endif
}
#else
// Sums of 16 bits += weights (u8) . values (s8), two products each. Weights of four bits and 32 k's of a column fit: 15 * 127 * 2
// in each of 8 quads. A product and its sum are kept together: GCC makes all products first, and has no registers for them.
FE_INLINE void add_short_dots(IVec& sums, IVec weights, IVec values) {
  IVec products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(weights), "x"(values));
}

// sums += weights (s8) . values (s8, at least -127), exact; `sizes`: |weights|. Values take the weights' signs, and two products,
// 2 * 128 * 127 at most, fit into 16 bits.
FE_INLINE void add_signed_dots(IVec& sums, IVec sizes, IVec weights, IVec values) {
  IVec products;
  asm("vpsignb %3, %4, %1\n\tvpmaddubsw %1, %2, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sums), "=&x"(products)
      : "x"(sizes), "x"(weights), "x"(values), "x"(_mm256_set1_epi16(1)));
}

// 32 k's of kRows rows and kVecs vectors of weights, those of u at a quad being load(quad, u).
template <int kRows, int kVecs, typename Load>
FE_INLINE void sum_shorts(const uint8_t* quad, int64_t quad_bytes, const int32_t* values, int64_t stride, const Load& load, IVec (&sums)[kRows][kVecs]) {
  for (int r = 0; r < kRows; ++r) {
    for (int u = 0; u < kVecs; ++u) sums[r][u] = iset(0);
  }
#pragma GCC unroll 8
  for (int q = 0; q < kBlockK / 4; ++q, quad += quad_bytes, values += stride) {
    asm("" : "+r"(quad), "+r"(values));  // else each quad has addresses of its own, in more registers than there are
    IVec weights[kVecs];
    for (int u = 0; u < kVecs; ++u) weights[u] = load(quad, u);
    for (int r = 0; r < kRows; ++r) {
      const IVec value = iset(values[r]);
      for (int u = 0; u < kVecs; ++u) add_short_dots(sums[r][u], weights[u], value);
    }
  }
}
#endif

// sums += pairs of s16 . pairs of s16, exact.
FE_INLINE void add_pairs(IVec& sums, IVec a, IVec b) {
#if defined(FE_EMULATED) && defined(FE_HAS_DOTS)
  sums = fe_dot_words(sums, a, b);
#elif defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
#elif defined(__AVXVNNI__)
  asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
#else
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

}  // namespace FE_ISA
}  // namespace fastengine
