// Finds the largest entries of a row without sorting it.
#pragma once

#include "simd.h"

namespace fastengine {
namespace FE_ISA {

// Entries of a row that may be chosen, in ascending order of id, in arrays of whole vectors.
struct Candidates {
  float* values;   // at most 0 after the row's maximum was taken off
  int32_t* ids;
  float* weights;  // e^value, where a caller needs them
  int64_t count;
  float* spare;  // [2 * the most there may be], for select_prefix
};

// The n-th float at or below zero, from the largest down: 0 is zero itself, kLastRank is -inf.
FE_INLINE float float_of_rank(uint32_t n) {
  const uint32_t bits = n | 0x80000000u;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr uint32_t kLastRank = 0x7f800000u;

// A prefix of the order (value descending, id ascending): every entry above `value`, and the first `ties` of
// those that equal it.
struct Prefix {
  float value;
  int64_t ties;
};

// Adds the lanes of `weights` whose value is at least `bound`.
FE_INLINE Vec add_where_ge(Vec sum, Vec weights, Vec values, Vec bound) {
#if defined(__AVX512F__)
  return _mm512_mask_add_ps(sum, _mm512_cmp_ps_mask(values, bound, _CMP_GE_OQ), sum, weights);
#else
  return _mm256_add_ps(sum, _mm256_and_ps(weights, _mm256_cmp_ps(values, bound, _CMP_GE_OQ)));
#endif
}

#if !defined(__AVX512F__)
// For each set of lanes, which ones they are, lowest first, in a byte each.
struct LanesOfBits {
  uint64_t of[256];
};
static constexpr LanesOfBits lanes_of_bits() {
  LanesOfBits table{};
  for (int bits = 0; bits < 256; ++bits) {
    for (int lane = 0, at = 0; lane < 8; ++lane) {
      if ((bits >> lane & 1) != 0) table.of[bits] |= static_cast<uint64_t>(lane) << 8 * at++;
    }
  }
  return table;
}
static constexpr LanesOfBits kLanesOfBits = lanes_of_bits();

// Puts the lanes of `bits` in front. What is behind them is no matter, but is stored with them: a whole vector from p on.
FE_INLINE __m256i lanes_in_front(uint32_t bits) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kLanesOfBits.of[bits]))); }
FE_INLINE void vstore_lanes(float* p, Vec x, __m256i lanes) { vstore(p, _mm256_permutevar8x32_ps(x, lanes)); }
FE_INLINE void istore_lanes(int32_t* p, __m256i x, __m256i lanes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(x, lanes)); }
#endif

constexpr int64_t kSumPiece = 1024;  // entries summed in float before they go into a double

// totals[i]: what the entries count whose value is at least bounds[i]; each its weight, or 1 when `weights` is null.
template <int kBounds>
FE_INLINE void sum_where_ge(const Candidates& c, const float* weights, const float* bounds, double* totals) {
  for (int i = 0; i < kBounds; ++i) totals[i] = 0.0;
  for (int64_t begin = 0; begin < c.count; begin += kSumPiece) {
    const int64_t end = min_i(c.count, begin + kSumPiece);
    Vec sums[kBounds];
    for (int i = 0; i < kBounds; ++i) sums[i] = vzero();
    const auto add = [&](Vec values, Vec each) {
      for (int i = 0; i < kBounds; ++i) sums[i] = add_where_ge(sums[i], each, values, vset(bounds[i]));
    };
    int64_t at = begin;
    for (; at + kLanes <= end; at += kLanes) add(vload(c.values + at), weights != nullptr ? vload(weights + at) : vset(1.0f));
    if (at < end) {
      const int64_t lanes = end - at;
      add(vload_n(c.values + at, lanes), vkeep_n(weights != nullptr ? vload_n(weights + at, lanes) : vset(1.0f), lanes, vzero()));
    }
    for (int i = 0; i < kBounds; ++i) totals[i] += static_cast<double>(vsum(sums[i]));
  }
}

// Copies the entries with `at_least` <= value < `below` to the front of `values_out` and `weights_out`, which may be where
// they are; weights may be null. Returns how many there are.
FE_INLINE int64_t keep_between(const float* values, const float* weights, int64_t count, float at_least, float below, float* values_out, float* weights_out) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t lanes = min_i(kLanes, count - i);
    const Vec value = vload_n(values + i, lanes);
    uint32_t bits = vge_bits(value, vset(at_least)) & ~vge_bits(value, vset(below)) & ((1u << lanes) - 1u);
    if (bits == 0) continue;
#if defined(__AVX512F__)
    const __mmask16 mask = static_cast<__mmask16>(bits);
    const int n = __builtin_popcount(bits);
    if (weights != nullptr) vstore_n(weights_out + kept, _mm512_maskz_compress_ps(mask, vload_n(weights + i, lanes)), n);
    vstore_n(values_out + kept, _mm512_maskz_compress_ps(mask, value), n);
    kept += n;
#else
    if (lanes == kLanes) {
      const __m256i front = lanes_in_front(bits);
      if (weights != nullptr) vstore_lanes(weights_out + kept, vload(weights + i), front);
      vstore_lanes(values_out + kept, value, front);
      kept += __builtin_popcount(bits);
      continue;
    }
    // The last ones one by one: nothing may be stored behind them.
    for (; bits != 0; bits &= bits - 1) {
      const int64_t at = i + __builtin_ctz(bits);
      if (weights != nullptr) weights_out[kept] = weights[at];
      values_out[kept++] = values[at];
    }
#endif
  }
  return kept;
}

// The shortest prefix whose total reaches `target`, where an entry counts its weight, or 1 when `weights` is
// null. The whole row if it never does; at least one entry. Values are at most 0. A search among the floats
// for the value at which the total reaches the target, eight ways at a time, and from the second round on
// among the entries that are still in question.
FE_INLINE Prefix select_prefix(const Candidates& c, const float* weights, double target) {
  constexpr int kBounds = 7;
  uint32_t low = 0, high = kLastRank;  // the rank searched is in [low, high]
  double before = 0.0;                 // of what is above `low`
  Candidates left{c.values, nullptr, nullptr, c.count, nullptr};
  float *const values = c.spare, *const own_weights = weights != nullptr ? c.spare + c.count : nullptr;
  const float* left_weights = weights;
  while (low < high) {
    const uint32_t width = high - low;
    float bounds[kBounds];
    uint32_t ranks[kBounds];
    for (uint32_t i = 0; i < kBounds; ++i) {
      ranks[i] = low + static_cast<uint32_t>(static_cast<uint64_t>(width) * (i + 1) / (kBounds + 1));
      bounds[i] = float_of_rank(ranks[i]);
    }
    double totals[kBounds];
    sum_where_ge<kBounds>(left, left_weights, bounds, totals);
    const double above = before;
    for (int i = kBounds; i-- > 0 && above + totals[i] >= target;) high = ranks[i];
    for (int i = 0; i < kBounds && above + totals[i] < target && ranks[i] < high; ++i) low = ranks[i] + 1, before = above + totals[i];
    left.count = keep_between(left.values, left_weights, left.count, float_of_rank(high), low == 0 ? 1.0f : float_of_rank(low - 1), values, own_weights);
    left.values = values;
    left_weights = own_weights;
  }
  // All that is left equals the value found.
  const int64_t ties = left.count;
  if (ties == 0) return {float_of_rank(low), ties};
  double tied;
  const float lowest = -__builtin_inff();
  sum_where_ge<1>(left, left_weights, &lowest, &tied);
  if (before + tied < target) return {float_of_rank(low), ties};
  const double each = tied / static_cast<double>(ties);
  int64_t wanted = before > 0.0 ? 0 : 1;
  while (wanted < ties && before + each * static_cast<double>(wanted) < target) ++wanted;
  return {float_of_rank(low), wanted};
}

// Moves the lanes of `bits` from place `from` to the end of what is kept. `kept` is at most `from`.
FE_INLINE int64_t keep_lanes(Candidates* c, int64_t from, uint32_t bits, int64_t kept) {
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>(bits);
  const Vec values = _mm512_maskz_compress_ps(mask, _mm512_maskz_loadu_ps(mask, c->values + from));
  const Vec weights = _mm512_maskz_compress_ps(mask, _mm512_maskz_loadu_ps(mask, c->weights + from));
  const __m512i ids = _mm512_maskz_compress_epi32(mask, _mm512_maskz_loadu_epi32(mask, c->ids + from));
  const int n = __builtin_popcount(bits);
  vstore_n(c->values + kept, values, n);
  vstore_n(c->weights + kept, weights, n);
  _mm512_mask_storeu_epi32(c->ids + kept, lane_mask(n), ids);
  return kept + n;
#else
  const __m256i front = lanes_in_front(bits);
  vstore_lanes(c->values + kept, vload(c->values + from), front);
  vstore_lanes(c->weights + kept, vload(c->weights + from), front);
  istore_lanes(c->ids + kept, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c->ids + from)), front);
  return kept + __builtin_popcount(bits);
#endif
}

// Drops every candidate that is not in the prefix.
FE_INLINE void keep_prefix(Candidates* c, Prefix prefix) {
  int64_t kept = 0, ties = 0;
  for (int64_t i = 0; i < c->count; i += kLanes) {
    const int64_t lanes = min_i(kLanes, c->count - i);
    const Vec values = vload_n(c->values + i, lanes);
    const uint32_t above = vgt_bits(values, vset(prefix.value)) & ((1u << lanes) - 1u);
    uint32_t equal = vge_bits(values, vset(prefix.value)) & ((1u << lanes) - 1u) & ~above, taken = 0;
    for (; equal != 0 && ties < prefix.ties; equal &= equal - 1, ++ties) taken |= equal & -equal;
    kept = keep_lanes(c, i, above | taken, kept);
  }
  c->count = kept;
}

// The largest value of a row; NaN counts as -inf.
FE_INLINE float row_maximum(const float* row, int64_t n) {
  const Vec lowest = vset(-__builtin_inff());
  Vec largest[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int u = 0; u < 4; ++u) largest[u] = vmax(vload(row + i + u * kLanes), largest[u]);
  }
  for (; i < n; i += kLanes) {
    const int64_t lanes = min_i(kLanes, n - i);
    largest[0] = vmax(vkeep_n(vload_n(row + i, lanes), lanes, lowest), largest[0]);
  }
  return vmaximum(vmax(vmax(largest[0], largest[1]), vmax(largest[2], largest[3])));
}

// The first index whose value is at least `value`; 0 if there is none.
FE_INLINE int32_t first_at_least(const float* row, int64_t n, float value) {
  const Vec wanted = vset(value);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = min_i(kLanes, n - i);
    const uint32_t bits = vge_bits(vload_n(row + i, lanes), wanted) & (lanes == 32 ? ~0u : (1u << lanes) - 1u);
    if (bits != 0) return static_cast<int32_t>(i + __builtin_ctz(bits));
  }
  return 0;
}

// (x - maximum) * inverse_temperature, at most 0; NaN and -inf become -inf.
FE_INLINE Vec scaled(Vec x, Vec maximum, Vec inverse_temperature) {
  return vmin(vmax(vmul(vsub(x, maximum), inverse_temperature), vset(-__builtin_inff())), vzero());
}

// Collects the entries whose scaled value is at least `threshold`, and returns how many there are.
FE_INLINE int64_t gather_candidates(const float* row, int64_t n, float maximum, float inverse_temperature, float threshold, Candidates* c) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = min_i(kLanes, n - i);
    const Vec values = scaled(vload_n(row + i, lanes), vset(maximum), vset(inverse_temperature));
    const uint32_t bits = vge_bits(values, vset(threshold)) & ((1u << lanes) - 1u);
    if (bits == 0) continue;
#if defined(__AVX512F__)
    const __mmask16 mask = static_cast<__mmask16>(bits);
    const int found = __builtin_popcount(bits);
    const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    vstore_n(c->values + count, _mm512_maskz_compress_ps(mask, values), found);
    _mm512_mask_storeu_epi32(c->ids + count, lane_mask(found), _mm512_maskz_compress_epi32(mask, ids));
    count += found;
#else
    const __m256i front = lanes_in_front(bits), ids = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(i)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    vstore_lanes(c->values + count, values, front);
    istore_lanes(c->ids + count, ids, front);
    count += __builtin_popcount(bits);
#endif
  }
  c->count = count;
  return count;
}

}  // namespace FE_ISA
}  // namespace fastengine
