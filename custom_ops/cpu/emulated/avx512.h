// AVX-512 with VNNI, and AVX-VNNI, in AVX2: what the kernels use of them, so that their logic can be tested on a processor that
// has neither. `setup_ops.py --emulated` includes this before every other header of those sets; it is no part of a build to be used.
//
// Estimates (rcp14, rsqrt14) are exact here. All else is what Intel's intrinsics guide says, of the operands that kernels have:
// rounding is to the nearest, and scalef and getexp know no denormals.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(FE_EMULATED_AVX512)
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#define __AVX512VNNI__ 1
#else
#define __AVXVNNI__ 1
#endif

#define FE_EMULATE static inline __attribute__((always_inline, unused))

// No member functions: kernels must leave no weak symbols.
union FeBits {
  __m512 ps;
  __m512d pd;
  __m512i si;
  __m256 half_ps[2];
  __m256d half_pd[2];
  __m256i half_si[2];
  __m128i quarters[4];
  float f32[16];
  int32_t i32[16];
  int16_t i16[32];
  int8_t i8[64];
};

FE_EMULATE FeBits fe_bits(__m512 x) {
  FeBits bits;
  bits.ps = x;
  return bits;
}
FE_EMULATE FeBits fe_bits(__m512d x) {
  FeBits bits;
  bits.pd = x;
  return bits;
}
FE_EMULATE FeBits fe_bits(__m512i x) {
  FeBits bits;
  bits.si = x;
  return bits;
}

// ---- what AVX2 has for halves, or for all parts of 128 bits alike ----

#define FE_UNARY(name, type, to, from, op) \
  FE_EMULATE type fe_##name(decltype(FeBits::from) x) { \
    const FeBits a = fe_bits(x); \
    FeBits r; \
    for (int h = 0; h < 2; ++h) r.half_##to[h] = op(a.half_##from[h]); \
    return r.to; \
  }
#define FE_BINARY(name, type, kind, op) \
  FE_EMULATE type fe_##name(type x, type y) { \
    const FeBits a = fe_bits(x), b = fe_bits(y); \
    FeBits r; \
    for (int h = 0; h < 2; ++h) r.half_##kind[h] = op(a.half_##kind[h], b.half_##kind[h]); \
    return r.kind; \
  }
#define FE_TERNARY(name, op) \
  FE_EMULATE __m512 fe_##name(__m512 x, __m512 y, __m512 z) { \
    const FeBits a = fe_bits(x), b = fe_bits(y), c = fe_bits(z); \
    FeBits r; \
    for (int h = 0; h < 2; ++h) r.half_ps[h] = op(a.half_ps[h], b.half_ps[h], c.half_ps[h]); \
    return r.ps; \
  }
#define FE_SHIFT(name, op) \
  FE_EMULATE __m512i fe_##name(__m512i x, unsigned count) { \
    const FeBits a = fe_bits(x); \
    FeBits r; \
    for (int h = 0; h < 2; ++h) r.half_si[h] = op(a.half_si[h], _mm_cvtsi32_si128(static_cast<int>(count))); \
    return r.si; \
  }

FE_UNARY(cvtps_epi32, __m512i, si, ps, _mm256_cvtps_epi32)
FE_UNARY(cvtepi32_ps, __m512, ps, si, _mm256_cvtepi32_ps)
FE_BINARY(add_ps, __m512, ps, _mm256_add_ps)
FE_BINARY(sub_ps, __m512, ps, _mm256_sub_ps)
FE_BINARY(mul_ps, __m512, ps, _mm256_mul_ps)
FE_BINARY(div_ps, __m512, ps, _mm256_div_ps)
FE_BINARY(min_ps, __m512, ps, _mm256_min_ps)
FE_BINARY(max_ps, __m512, ps, _mm256_max_ps)
FE_BINARY(unpacklo_ps, __m512, ps, _mm256_unpacklo_ps)
FE_BINARY(unpackhi_ps, __m512, ps, _mm256_unpackhi_ps)
FE_BINARY(unpacklo_pd, __m512d, pd, _mm256_unpacklo_pd)
FE_BINARY(unpackhi_pd, __m512d, pd, _mm256_unpackhi_pd)
FE_BINARY(and_si512, __m512i, si, _mm256_and_si256)
FE_BINARY(or_si512, __m512i, si, _mm256_or_si256)
FE_BINARY(add_epi32, __m512i, si, _mm256_add_epi32)
FE_BINARY(sub_epi32, __m512i, si, _mm256_sub_epi32)
FE_BINARY(mullo_epi16, __m512i, si, _mm256_mullo_epi16)
FE_BINARY(mullo_epi32, __m512i, si, _mm256_mullo_epi32)
FE_BINARY(mulhi_epu16, __m512i, si, _mm256_mulhi_epu16)
FE_BINARY(packs_epi16, __m512i, si, _mm256_packs_epi16)
FE_BINARY(packs_epi32, __m512i, si, _mm256_packs_epi32)
FE_BINARY(packus_epi16, __m512i, si, _mm256_packus_epi16)
FE_BINARY(packus_epi32, __m512i, si, _mm256_packus_epi32)
FE_TERNARY(fmadd_ps, _mm256_fmadd_ps)
FE_TERNARY(fnmadd_ps, _mm256_fnmadd_ps)
FE_SHIFT(slli_epi16, _mm256_sll_epi16)
FE_SHIFT(slli_epi32, _mm256_sll_epi32)
FE_SHIFT(srli_epi16, _mm256_srl_epi16)
FE_SHIFT(srli_epi32, _mm256_srl_epi32)
FE_EMULATE __m512i fe_sll_epi32(__m512i x, __m128i count) { return fe_slli_epi32(x, static_cast<unsigned>(_mm_cvtsi128_si32(count))); }

// ---- lane by lane ----

#define FE_LANES(n, expression) \
  FeBits r; \
  for (int i = 0; i < (n); ++i) expression; \
  return r

FE_EMULATE __m512 fe_set1_ps(float x) { FE_LANES(16, r.f32[i] = x).ps; }
FE_EMULATE __m512i fe_set1_epi32(int32_t x) { FE_LANES(16, r.i32[i] = x).si; }
FE_EMULATE __m512i fe_set1_epi8(int8_t x) { FE_LANES(64, r.i8[i] = x).si; }
FE_EMULATE __m512 fe_setzero_ps() { return fe_set1_ps(0.0f); }
FE_EMULATE __m512i fe_setzero_si512() { return fe_set1_epi32(0); }
template <typename... Rest>
FE_EMULATE __m512i fe_setr_epi32(Rest... lanes) {
  static_assert(sizeof...(lanes) == 16, "as many as there are lanes");
  const int32_t x[] = {lanes...};
  FE_LANES(16, r.i32[i] = x[i]).si;
}

FE_EMULATE __m512 fe_castsi512_ps(__m512i x) { return fe_bits(x).ps; }
FE_EMULATE __m512i fe_castps_si512(__m512 x) { return fe_bits(x).si; }
FE_EMULATE __m512d fe_castps_pd(__m512 x) { return fe_bits(x).pd; }
FE_EMULATE __m512 fe_castpd_ps(__m512d x) { return fe_bits(x).ps; }
FE_EMULATE __m256 fe_castps512_ps256(__m512 x) { return fe_bits(x).half_ps[0]; }
FE_EMULATE __m256 fe_extractf32x8_ps(__m512 x, int half) { return fe_bits(x).half_ps[half]; }

FE_EMULATE FeBits fe_load(const void* p, int64_t num_bytes = 64) {
  FeBits r;
  r.si = fe_setzero_si512();
  memcpy(&r, p, static_cast<size_t>(num_bytes));
  return r;
}
FE_EMULATE __m512 fe_loadu_ps(const void* p) { return fe_load(p).ps; }
FE_EMULATE __m512i fe_loadu_si512(const void* p) { return fe_load(p).si; }
FE_EMULATE void fe_storeu_ps(void* p, __m512 x) { memcpy(p, &x, sizeof(x)); }
FE_EMULATE void fe_storeu_si512(void* p, __m512i x) { memcpy(p, &x, sizeof(x)); }
// Nothing of what a mask leaves out is read or written.
FE_EMULATE __m512i fe_maskz_loadu_epi32(__mmask16 mask, const void* p) {
  FeBits r;
  r.si = fe_setzero_si512();
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) memcpy(&r.i32[i], static_cast<const char*>(p) + 4 * i, 4);
  }
  return r.si;
}
FE_EMULATE __m512 fe_maskz_loadu_ps(__mmask16 mask, const void* p) { return fe_castsi512_ps(fe_maskz_loadu_epi32(mask, p)); }
FE_EMULATE void fe_mask_storeu_epi32(void* p, __mmask16 mask, __m512i x) {
  const FeBits a = fe_bits(x);
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) memcpy(static_cast<char*>(p) + 4 * i, &a.i32[i], 4);
  }
}
FE_EMULATE void fe_mask_storeu_ps(void* p, __mmask16 mask, __m512 x) { fe_mask_storeu_epi32(p, mask, fe_castps_si512(x)); }
FE_EMULATE void fe_mask_storeu_epi8(void* p, __mmask64 mask, __m512i x) {
  const FeBits a = fe_bits(x);
  for (int i = 0; i < 64; ++i) {
    if (mask >> i & 1) reinterpret_cast<int8_t*>(p)[i] = a.i8[i];
  }
}
FE_EMULATE __m512i fe_i32gather_epi32(__m512i at, const void* p, int scale) {
  const FeBits a = fe_bits(at);
  FE_LANES(16, memcpy(&r.i32[i], static_cast<const char*>(p) + static_cast<int64_t>(a.i32[i]) * scale, 4)).si;
}

FE_EMULATE __m512 fe_mask_blend_ps(__mmask16 mask, __m512 x, __m512 y) {
  const FeBits a = fe_bits(x), b = fe_bits(y);
  FE_LANES(16, r.i32[i] = mask >> i & 1 ? b.i32[i] : a.i32[i]).ps;
}
FE_EMULATE __m512 fe_maskz_mov_ps(__mmask16 mask, __m512 x) { return fe_mask_blend_ps(mask, fe_setzero_ps(), x); }
FE_EMULATE __m512 fe_mask_add_ps(__m512 other, __mmask16 mask, __m512 x, __m512 y) { return fe_mask_blend_ps(mask, other, fe_add_ps(x, y)); }
FE_EMULATE __m512 fe_maskz_div_ps(__mmask16 mask, __m512 x, __m512 y) { return fe_maskz_mov_ps(mask, fe_div_ps(x, y)); }
FE_EMULATE __m512i fe_maskz_compress_epi32(__mmask16 mask, __m512i x) {
  const FeBits a = fe_bits(x);
  FeBits r;
  r.si = fe_setzero_si512();
  for (int i = 0, to = 0; i < 16; ++i) {
    if (mask >> i & 1) r.i32[to++] = a.i32[i];
  }
  return r.si;
}
FE_EMULATE __m512 fe_maskz_compress_ps(__mmask16 mask, __m512 x) { return fe_castsi512_ps(fe_maskz_compress_epi32(mask, fe_castps_si512(x))); }

// Ordered comparisons: the kernels have no others.
FE_EMULATE __mmask16 fe_cmp_ps_mask(__m512 x, __m512 y, int predicate) {
  const FeBits a = fe_bits(x), b = fe_bits(y);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool less = a.f32[i] < b.f32[i], equal = a.f32[i] == b.f32[i], greater = a.f32[i] > b.f32[i];
    bool holds = false;
    switch (predicate) {
      case _CMP_EQ_OQ: holds = equal; break;
      case _CMP_LT_OQ: holds = less; break;
      case _CMP_LE_OQ: holds = less || equal; break;
      case _CMP_GT_OQ: holds = greater; break;
      case _CMP_GE_OQ: holds = greater || equal; break;
      default: __builtin_trap();
    }
    mask |= (holds ? 1u : 0u) << i;
  }
  return static_cast<__mmask16>(mask);
}

FE_EMULATE __m512 fe_shuffle_ps(__m512 x, __m512 y, int order) {
  const FeBits a = fe_bits(x), b = fe_bits(y);
  FE_LANES(16, r.i32[i] = (i % 4 < 2 ? a : b).i32[i / 4 * 4 + (order >> i % 4 * 2 & 3)]).ps;
}
FE_EMULATE __m512 fe_permute_ps(__m512 x, int order) { return fe_shuffle_ps(x, x, order); }
FE_EMULATE __m512i fe_shuffle_i32x4(__m512i x, __m512i y, int order) {
  const FeBits a = fe_bits(x), b = fe_bits(y);
  FE_LANES(4, r.quarters[i] = (i < 2 ? a : b).quarters[order >> i * 2 & 3]).si;
}
FE_EMULATE __m512 fe_shuffle_f32x4(__m512 x, __m512 y, int order) { return fe_castsi512_ps(fe_shuffle_i32x4(fe_castps_si512(x), fe_castps_si512(y), order)); }
FE_EMULATE __m512i fe_permutexvar_epi32(__m512i order, __m512i x) {
  const FeBits a = fe_bits(order), b = fe_bits(x);
  FE_LANES(16, r.i32[i] = b.i32[a.i32[i] & 15]).si;
}

FE_EMULATE __m512i fe_cvtepu8_epi32(__m128i x) {
  uint8_t a[16];
  memcpy(a, &x, sizeof(a));
  FE_LANES(16, r.i32[i] = a[i]).si;
}
FE_EMULATE __m512i fe_cvtepu16_epi32(__m256i x) {
  uint16_t a[16];
  memcpy(a, &x, sizeof(a));
  FE_LANES(16, r.i32[i] = a[i]).si;
}
FE_EMULATE __m512 fe_cvtph_ps(__m256i x) {
  FeBits r;
  r.half_ps[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
  r.half_ps[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
  return r.ps;
}
FE_EMULATE __m128i fe_cvtepi32_epi8(__m512i x) {
  const FeBits a = fe_bits(x);
  FE_LANES(16, r.i8[i] = static_cast<int8_t>(a.i32[i])).quarters[0];
}
FE_EMULATE __m128i fe_cvtsepi32_epi8(__m512i x) {
  const FeBits a = fe_bits(x);
  FE_LANES(16, r.i8[i] = static_cast<int8_t>(a.i32[i] < -128 ? -128 : a.i32[i] > 127 ? 127 : a.i32[i])).quarters[0];
}

FE_EMULATE __m512 fe_abs_ps(__m512 x) { return fe_castsi512_ps(fe_and_si512(fe_castps_si512(x), fe_set1_epi32(0x7fffffff))); }
FE_EMULATE __m512 fe_rcp14_ps(__m512 x) { return fe_div_ps(fe_set1_ps(1.0f), x); }
FE_EMULATE __m512 fe_rsqrt14_ps(__m512 x) {
  const FeBits a = fe_bits(x);
  FE_LANES(16, r.f32[i] = 1.0f / sqrtf(a.f32[i])).ps;
}
// To whole numbers, and what is above the whole number below.
FE_EMULATE __m512 fe_roundscale_ps(__m512 x, int) {
  const FeBits a = fe_bits(x);
  FE_LANES(2, r.half_ps[i] = _mm256_round_ps(a.half_ps[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)).ps;
}
FE_EMULATE __m512 fe_reduce_ps(__m512 x, int) {
  const FeBits a = fe_bits(x);
  FE_LANES(16, r.f32[i] = __builtin_isinf(a.f32[i]) ? 0.0f : a.f32[i] - floorf(a.f32[i])).ps;
}
FE_EMULATE __m512 fe_scalef_ps(__m512 x, __m512 y) {
  const FeBits a = fe_bits(x), b = fe_bits(y);
  FE_LANES(16, r.f32[i] = __builtin_isnan(b.f32[i]) ? b.f32[i] : scalbnf(a.f32[i], static_cast<int>(fmaxf(-400.0f, fminf(400.0f, floorf(b.f32[i])))))).ps;
}
FE_EMULATE __m512 fe_getexp_ps(__m512 x) {
  const FeBits a = fe_bits(x);
  FE_LANES(16, r.f32[i] = logbf(a.f32[i])).ps;
}
FE_EMULATE __m512 fe_getmant_ps(__m512 x, int, int) {
  const FeBits a = fe_bits(x);
  FE_LANES(16, r.f32[i] = scalbnf(a.f32[i], -ilogbf(a.f32[i]))).ps;
}

// In the order of GCC's: halves, then halves of these.
FE_EMULATE float fe_reduce_add_ps(__m512 x) {
  FeBits a = fe_bits(x);
  for (int n = 8; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) a.f32[i] += a.f32[i + n];
  }
  return a.f32[0];
}
FE_EMULATE float fe_reduce_max_ps(__m512 x) {
  FeBits a = fe_bits(x);
  for (int n = 8; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) a.f32[i] = a.f32[i] > a.f32[i + n] ? a.f32[i] : a.f32[i + n];
  }
  return a.f32[0];
}
FE_EMULATE int32_t fe_reduce_add_epi32(__m512i x) {
  const FeBits a = fe_bits(x);
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += static_cast<uint32_t>(a.i32[i]);
  return static_cast<int32_t>(sum);
}

// ---- dot products, of either width ----

FE_EMULATE __m256i fe_dot_bytes(__m256i sums, __m256i weights, __m256i values) {
  // In 16 bits two products of bytes may not fit: even and odd ones apart.
  const __m256i low = _mm256_set1_epi16(255);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(weights, low), _mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(values, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
FE_EMULATE __m256i fe_dot_words(__m256i sums, __m256i a, __m256i b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
#define FE_DOT(name) \
  FE_EMULATE __m512i name(__m512i x, __m512i y, __m512i z) { \
    const FeBits a = fe_bits(x), b = fe_bits(y), c = fe_bits(z); \
    FeBits r; \
    for (int h = 0; h < 2; ++h) r.half_si[h] = name(a.half_si[h], b.half_si[h], c.half_si[h]); \
    return r.si; \
  }
FE_DOT(fe_dot_bytes)
FE_DOT(fe_dot_words)

#undef _mm512_abs_ps
#define _mm512_abs_ps fe_abs_ps
#undef _mm512_add_epi32
#define _mm512_add_epi32 fe_add_epi32
#undef _mm512_add_ps
#define _mm512_add_ps fe_add_ps
#undef _mm512_and_si512
#define _mm512_and_si512 fe_and_si512
#undef _mm512_castpd_ps
#define _mm512_castpd_ps fe_castpd_ps
#undef _mm512_castps512_ps256
#define _mm512_castps512_ps256 fe_castps512_ps256
#undef _mm512_castps_pd
#define _mm512_castps_pd fe_castps_pd
#undef _mm512_castps_si512
#define _mm512_castps_si512 fe_castps_si512
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps fe_castsi512_ps
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask fe_cmp_ps_mask
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8 fe_cvtepi32_epi8
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps fe_cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 fe_cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 fe_cvtepu8_epi32
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps fe_cvtph_ps
#undef _mm512_cvtps_epi32
#define _mm512_cvtps_epi32 fe_cvtps_epi32
#undef _mm512_cvtsepi32_epi8
#define _mm512_cvtsepi32_epi8 fe_cvtsepi32_epi8
#undef _mm512_div_ps
#define _mm512_div_ps fe_div_ps
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps fe_extractf32x8_ps
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps fe_fmadd_ps
#undef _mm512_fnmadd_ps
#define _mm512_fnmadd_ps fe_fnmadd_ps
#undef _mm512_getexp_ps
#define _mm512_getexp_ps fe_getexp_ps
#undef _mm512_getmant_ps
#define _mm512_getmant_ps fe_getmant_ps
#undef _mm512_i32gather_epi32
#define _mm512_i32gather_epi32 fe_i32gather_epi32
#undef _mm512_loadu_ps
#define _mm512_loadu_ps fe_loadu_ps
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 fe_loadu_si512
#undef _mm512_mask_add_ps
#define _mm512_mask_add_ps fe_mask_add_ps
#undef _mm512_mask_blend_ps
#define _mm512_mask_blend_ps fe_mask_blend_ps
#undef _mm512_mask_storeu_epi32
#define _mm512_mask_storeu_epi32 fe_mask_storeu_epi32
#undef _mm512_mask_storeu_epi8
#define _mm512_mask_storeu_epi8 fe_mask_storeu_epi8
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps fe_mask_storeu_ps
#undef _mm512_maskz_compress_epi32
#define _mm512_maskz_compress_epi32 fe_maskz_compress_epi32
#undef _mm512_maskz_compress_ps
#define _mm512_maskz_compress_ps fe_maskz_compress_ps
#undef _mm512_maskz_div_ps
#define _mm512_maskz_div_ps fe_maskz_div_ps
#undef _mm512_maskz_loadu_epi32
#define _mm512_maskz_loadu_epi32 fe_maskz_loadu_epi32
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps fe_maskz_loadu_ps
#undef _mm512_maskz_mov_ps
#define _mm512_maskz_mov_ps fe_maskz_mov_ps
#undef _mm512_max_ps
#define _mm512_max_ps fe_max_ps
#undef _mm512_min_ps
#define _mm512_min_ps fe_min_ps
#undef _mm512_mul_ps
#define _mm512_mul_ps fe_mul_ps
#undef _mm512_mulhi_epu16
#define _mm512_mulhi_epu16 fe_mulhi_epu16
#undef _mm512_mullo_epi16
#define _mm512_mullo_epi16 fe_mullo_epi16
#undef _mm512_mullo_epi32
#define _mm512_mullo_epi32 fe_mullo_epi32
#undef _mm512_or_si512
#define _mm512_or_si512 fe_or_si512
#undef _mm512_packs_epi16
#define _mm512_packs_epi16 fe_packs_epi16
#undef _mm512_packs_epi32
#define _mm512_packs_epi32 fe_packs_epi32
#undef _mm512_packus_epi16
#define _mm512_packus_epi16 fe_packus_epi16
#undef _mm512_packus_epi32
#define _mm512_packus_epi32 fe_packus_epi32
#undef _mm512_permute_ps
#define _mm512_permute_ps fe_permute_ps
#undef _mm512_permutexvar_epi32
#define _mm512_permutexvar_epi32 fe_permutexvar_epi32
#undef _mm512_rcp14_ps
#define _mm512_rcp14_ps fe_rcp14_ps
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32 fe_reduce_add_epi32
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps fe_reduce_add_ps
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps fe_reduce_max_ps
#undef _mm512_reduce_ps
#define _mm512_reduce_ps fe_reduce_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps fe_roundscale_ps
#undef _mm512_rsqrt14_ps
#define _mm512_rsqrt14_ps fe_rsqrt14_ps
#undef _mm512_scalef_ps
#define _mm512_scalef_ps fe_scalef_ps
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 fe_set1_epi32
#undef _mm512_set1_epi8
#define _mm512_set1_epi8 fe_set1_epi8
#undef _mm512_set1_ps
#define _mm512_set1_ps fe_set1_ps
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 fe_setr_epi32
#undef _mm512_setzero_ps
#define _mm512_setzero_ps fe_setzero_ps
#undef _mm512_setzero_si512
#define _mm512_setzero_si512 fe_setzero_si512
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 fe_shuffle_f32x4
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 fe_shuffle_i32x4
#undef _mm512_shuffle_ps
#define _mm512_shuffle_ps fe_shuffle_ps
#undef _mm512_sll_epi32
#define _mm512_sll_epi32 fe_sll_epi32
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 fe_slli_epi16
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 fe_slli_epi32
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 fe_srli_epi16
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 fe_srli_epi32
#undef _mm512_storeu_ps
#define _mm512_storeu_ps fe_storeu_ps
#undef _mm512_storeu_si512
#define _mm512_storeu_si512 fe_storeu_si512
#undef _mm512_sub_epi32
#define _mm512_sub_epi32 fe_sub_epi32
#undef _mm512_sub_ps
#define _mm512_sub_ps fe_sub_ps
#undef _mm512_unpackhi_pd
#define _mm512_unpackhi_pd fe_unpackhi_pd
#undef _mm512_unpackhi_ps
#define _mm512_unpackhi_ps fe_unpackhi_ps
#undef _mm512_unpacklo_pd
#define _mm512_unpacklo_pd fe_unpacklo_pd
#undef _mm512_unpacklo_ps
#define _mm512_unpacklo_ps fe_unpacklo_ps
#undef _mm512_dpbusd_epi32
#define _mm512_dpbusd_epi32 fe_dot_bytes
