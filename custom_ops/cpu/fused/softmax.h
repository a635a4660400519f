// The online softmax of attention, in powers of two.
#pragma once

#include "attention.h"

namespace fastengine {
namespace FE_ISA {

constexpr float kLowest = -1.0e30f;  // a score that weighs nothing, and survives a subtraction

// (p[0] * x + p[1]) * x + ...
template <int kTerms>
FE_INLINE Vec polynomial(const float (&p)[kTerms], Vec x) {
  Vec y = vset(p[0]);
  for (int i = 1; i < kTerms; ++i) y = vfma(y, x, vset(p[i]));
  return y;
}

// 2^x for x below 127, 0 far below zero; `p` approximates it over [0, 1).
template <int kTerms>
FE_INLINE Vec exp2_with(const float (&p)[kTerms], Vec x) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(polynomial(p, _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)), x);
#else
  // In this order a NaN passes through. From -127 on 2^whole is 0; its exponent are the last bits of the sum.
  const Vec clamped = vmax(vset(-127.0f), x), whole = _mm256_floor_ps(clamped), exponent = vadd(whole, vset(kMagic + 127.0f));
  return vmul(polynomial(p, vsub(clamped, whole)), _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(exponent), 23)));
#endif
}

// To 1e-7 of its value, and exactly 1 at 0: folding in a chunk of which a row sees nothing changes no bit of it.
FE_INLINE Vec exp2_fine(Vec x) {
  constexpr float p[] = {1.87757667e-3f, 8.98933839e-3f, 5.58263180e-2f, 2.40153617e-1f, 6.93153073e-1f, 1.0f};
  return exp2_with(p, x);
}

// To 8e-5: for weights that are rounded to eight bits.
FE_INLINE Vec exp2_coarse(Vec x) {
  constexpr float p[] = {7.8024521e-2f, 2.2606716e-1f, 6.9583354e-1f, 9.9992522e-1f};
  return exp2_with(p, x);
}

// log2 of normal positive x, to 2e-5.
FE_INLINE Vec log2_coarse(Vec x) {
  constexpr float p[] = {4.487361e-2f, -4.1656368e-1f, 1.63114884f, -3.55079317f, 5.09171108f, -2.80036414f};
#if defined(__AVX512F__)
  return vadd(polynomial(p, _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src)), _mm512_getexp_ps(x));
#else
  const __m256i bits = _mm256_castps_si256(x), one = _mm256_castps_si256(vset(1.0f));
  const Vec mantissa = _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)), one));
  return vadd(polynomial(p, mantissa), _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(bits, 23), _mm256_set1_epi32(127))));
#endif
}

// What is known of up to kLanes rows: the largest score so far and the sum of 2^(score - largest).
struct RowState {
  Vec maximum, sum;
};

// Without its last two bits: times three, or a power of two times that, such a number is exact.
FE_INLINE Vec shortened(Vec x) {
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(~3)));
#else
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(~3)));
#endif
}

// Factors for what a row's output holds and for a chunk's weighted values, to add them up.
struct Fold {
  Vec kept, added;  // `added` is shortened
};

FE_INLINE Fold fold_rows(RowState* state, RowState chunk) {
  const Vec now = vmax(chunk.maximum, state->maximum);
  const Fold fold{exp2_fine(vsub(state->maximum, now)), shortened(exp2_fine(vsub(chunk.maximum, now)))};
  *state = {now, vfma(chunk.sum, fold.added, vmul(state->sum, fold.kept))};
  return fold;
}

}  // namespace FE_ISA
}  // namespace fastengine
