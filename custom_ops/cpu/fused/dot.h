// Dot products of unsigned weights and signed activations.
//
// An IVec holds one int32 sum per column; its weights operand holds four k's of each column.
#pragma once

#include "activations.h"

namespace fastengine {
namespace FE_ISA {

#if defined(__AVX512F__)
using IVec = __m512i;
FE_INLINE IVec iset(int32_t x) { return _mm512_set1_epi32(x); }
FE_INLINE IVec iload(const void* p) { return _mm512_loadu_si512(p); }
FE_INLINE void istore(void* p, IVec x) { _mm512_storeu_si512(p, x); }
FE_INLINE Vec to_floats(IVec x) { return _mm512_cvtepi32_ps(x); }
#else
using IVec = __m256i;
FE_INLINE IVec iset(int32_t x) { return _mm256_set1_epi32(x); }
FE_INLINE IVec iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
FE_INLINE void istore(void* p, IVec x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
FE_INLINE Vec to_floats(IVec x) { return _mm256_cvtepi32_ps(x); }
#endif

// sums += weights (u8) . values (s8), exact. Inline assembly where the instruction exists: compilers
// copy accumulators around the intrinsic and spill.
FE_INLINE void add_dots(IVec& sums, IVec weights, IVec values) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(values));
#elif defined(__AVXVNNI__)
  asm("{vex} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(values));
#else
  // _mm256_maddubs_epi16 saturates with full-range bytes; widen to 16 bits instead.
  const IVec even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8));
  const IVec odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(values, 8));
  sums = _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
#endif
}

}  // namespace FE_ISA
}  // namespace fastengine
