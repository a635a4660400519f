// Finds the largest entries of a row without sorting it.
#pragma once

#include "simd.h"

namespace fastengine {
namespace FE_ISA {

// Entries of a row that may be chosen, in ascending order of id.
struct Candidates {
  float* values;   // at most 0 after the row's maximum was taken off
  int32_t* ids;
  float* weights;  // e^value, where a caller needs them
  int64_t count;
};

// The floats' order as that of unsigned integers, largest first: 0 is +inf.
FE_INLINE uint32_t descending_key(float value) {
  uint32_t bits;
  value += 0.0f;  // -0 equals 0
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x80000000u) != 0 ? bits : 0x7fffffffu - bits;
}

// A prefix of the order (value descending, id ascending): every entry with a key below `key`, and the
// first `ties` of those that equal it.
struct Prefix {
  uint32_t key;
  int64_t ties;
};

constexpr int kRadixBits = 11;
constexpr int kRadixBins = 1 << kRadixBits;

// Scratch of select_prefix.
struct RadixBins {
  double mass[kRadixBins];
  int32_t count[kRadixBins];
};

// The shortest prefix whose total reaches `target`, where an entry counts its weight, or 1 when
// `weights` is null. The whole row if it never does; at least one entry. Radix selection from the top
// bits down: three passes, of which the later ones touch only one bin's entries.
FE_INLINE Prefix select_prefix(const Candidates& c, const float* weights, double target, RadixBins* bins) {
  uint32_t prefix = 0;
  double before = 0.0;
  for (int shift = 32 - kRadixBits;; shift = shift > kRadixBits ? shift - kRadixBits : 0) {
    const int width = shift == 0 ? 32 - 2 * kRadixBits : kRadixBits;
    const int upper = shift + width;
    __builtin_memset(bins, 0, sizeof(*bins));
    for (int64_t i = 0; i < c.count; ++i) {
      const uint32_t key = descending_key(c.values[i]);
      if (upper < 32 && (key >> upper) != (prefix >> upper)) continue;
      const uint32_t bin = (key >> shift) & ((1u << width) - 1u);
      bins->count[bin] += 1;
      if (weights != nullptr) bins->mass[bin] += static_cast<double>(weights[i]);
    }
    int last = -1;
    for (int bin = 0; bin < (1 << width); ++bin) {
      if (bins->count[bin] == 0) continue;
      last = bin;
      const double mass = weights != nullptr ? bins->mass[bin] : static_cast<double>(bins->count[bin]);
      if (before + mass >= target) break;
      before += mass;
    }
    // Never reached: rounding, or a target past the end. Then the last bin is taken whole.
    const double last_mass = weights != nullptr ? bins->mass[last] : static_cast<double>(bins->count[last]);
    const bool reached = before + last_mass >= target;
    prefix |= static_cast<uint32_t>(last) << shift;
    if (!reached && shift != 0) {
      before -= last_mass;
      continue;
    }
    if (shift != 0) continue;
    const int64_t ties = bins->count[last];
    if (!reached) return {prefix, ties};
    const double each = last_mass / static_cast<double>(ties);
    int64_t wanted = 1;
    while (wanted < ties && before + each * static_cast<double>(wanted) < target) ++wanted;
    return {prefix, wanted};
  }
}

// Drops every candidate that is not in the prefix.
FE_INLINE void keep_prefix(Candidates* c, Prefix prefix) {
  int64_t kept = 0, ties = 0;
  for (int64_t i = 0; i < c->count; ++i) {
    const uint32_t key = descending_key(c->values[i]);
    const bool tied = key == prefix.key;
    if (!(key < prefix.key || (tied && ties < prefix.ties))) continue;
    ties += tied ? 1 : 0;
    c->values[kept] = c->values[i];
    c->ids[kept] = c->ids[i];
    c->weights[kept] = c->weights[i];
    ++kept;
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
    uint32_t bits = vge_bits(values, vset(threshold)) & ((1u << lanes) - 1u);
    if (bits == 0) continue;
    float lane_values[kLanes];
    vstore(lane_values, values);
    for (; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      c->values[count] = lane_values[lane];
      c->ids[count] = static_cast<int32_t>(i + lane);
      ++count;
    }
  }
  c->count = count;
  return count;
}

}  // namespace FE_ISA
}  // namespace fastengine
