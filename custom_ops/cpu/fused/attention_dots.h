// Operands of attention's dot products, each of which stands in many: quads of a row's values, four of which a dot product
// takes, and of a vector's columns.
//
// Where the product is one instruction they are bytes as they come. Where it is not, they are widened to 16 bits once and not
// in each product: of a quad the first and third, which are multiplied at once, apart from the second and fourth.
#pragma once

#include "dot.h"

namespace fastengine {
namespace FE_ISA {

#if defined(FE_HAS_DOTS)
using Query = int8_t;
using Weight = uint8_t;
using Columns = IVec;

constexpr int32_t kFirstSum = kMagicBits;  // of weighted values
FE_INLINE IVec value_sum(IVec sum) { return sum; }

FE_INLINE Columns key_columns(IVec x) { return x; }
FE_INLINE Columns value_columns(IVec x) { return x; }

FE_INLINE IVec spread_quad(const void* quad) {
  int32_t bytes;
  __builtin_memcpy(&bytes, quad, sizeof(bytes));
  return iset(bytes);
}

// Spread once: of 24 products beside each other, one of which takes half a cycle, not each can load a query for itself.
template <int kVecs>
FE_INLINE void add_quad(IVec (&sums)[kVecs], const Columns (&keys)[kVecs], const Query* quad) {
  const IVec q = spread_quad(quad);
  for (int v = 0; v < kVecs; ++v) add_dots(sums[v], keys[v], q);
}
template <int kVecs>
FE_INLINE void add_quad(IVec (&sums)[kVecs], const Columns (&values)[kVecs], const Weight* quad) {
  const IVec p = spread_quad(quad);
  for (int v = 0; v < kVecs; ++v) add_dots(sums[v], p, values[v]);
}

FE_INLINE void put_queries(const int8_t* from, int64_t n, Query* to) {
  for (int64_t i = 0; i < n; i += 4 * kLanes) istore(to + i, iload(from + i));
}

// Where of 16 positions' weights the i-th quad is.
FE_INLINE constexpr int64_t place_of_quad(int64_t i) { return 4 * i; }

// Four vectors of integers from 0 to 255, or two.
#if defined(__AVX512F__)
FE_INLINE void put_weights(const IVec (&x)[4], Weight* out) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32(x[0], x[1]), _mm512_packus_epi32(x[2], x[3]));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, bytes));
}
FE_INLINE void put_weights(const IVec (&x)[2], Weight* out) {
  for (int i = 0; i < 2; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), _mm512_cvtepi32_epi8(x[i]));
}
#else
FE_INLINE void put_weights(const IVec (&x)[2], Weight* out) {
  const __m256i words = _mm256_packus_epi32(x[0], x[1]);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(bytes));
}
#endif
#else
using Query = int16_t;
using Weight = int16_t;
struct Columns {
  IVec even, odd;
};

// Values are 256 times as large, which takes an operation less to widen them; 128 positions' sums stay below 2^31.
constexpr int32_t kFirstSum = 0;
FE_INLINE IVec value_sum(IVec sum) { return _mm256_add_epi32(_mm256_srai_epi32(sum, 8), iset(kMagicBits)); }

FE_INLINE Columns key_columns(IVec x) { return {_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srli_epi16(x, 8)}; }
FE_INLINE Columns value_columns(IVec x) { return {_mm256_slli_epi16(x, 8), _mm256_and_si256(x, _mm256_set1_epi16(-256))}; }

// By the load. Compilers make one load of eight bytes of two, and spread each half of it with two operations of the vector units.
FE_INLINE IVec spread_pair(const int16_t* pair) {
  IVec spread;
  asm("vpbroadcastd %1, %0" : "=x"(spread) : "m"(*reinterpret_cast<const int16_t(*)[2]>(pair)));
  return spread;
}

// In one piece: compilers put all products before all sums, and spill.
FE_INLINE void add_products(IVec& sum, IVec a, IVec b) {
  IVec product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
}

template <int kVecs>
FE_INLINE void add_quad(IVec (&sums)[kVecs], const Columns (&columns)[kVecs], const int16_t* quad) {
  const IVec even = spread_pair(quad), odd = spread_pair(quad + 2);
  for (int v = 0; v < kVecs; ++v) add_products(sums[v], columns[v].even, even);
  for (int v = 0; v < kVecs; ++v) add_products(sums[v], columns[v].odd, odd);
}

// Quads of 16 bits with the second and third of each changed over.
FE_INLINE IVec order_quads(IVec x) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order));
}

FE_INLINE void put_queries(const int8_t* from, int64_t n, Query* to) {
  for (int64_t i = 0; i < n; i += 16) istore(to + i, order_quads(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)))));
}

// Where of 16 positions' weights the i-th quad is: they stay in the order in which they are packed.
FE_INLINE constexpr int64_t place_of_quad(int64_t i) { return i % 2 * 8 + i / 2 * 4; }

// Two vectors of integers from 0 to 255.
FE_INLINE void put_weights(const IVec (&x)[2], Weight* out) { istore(out, order_quads(_mm256_packus_epi32(x[0], x[1]))); }
#endif

}  // namespace FE_ISA
}  // namespace fastengine
