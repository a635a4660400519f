// Where things lie in a panel of 32 columns, its blocks of 32 k's and groups of 64; pack.h has the picture.
#pragma once

#include <cstdint>

namespace fastengine {
namespace fused {

constexpr int64_t kScalesAt = 0;  // f16[32]
constexpr int64_t kInt8BlockBytes = 1088, kInt8ValuesAt = 64;                          // u8[8][32][4]
constexpr int64_t kInt4GroupBytes = 1088, kInt4NibblesAt = 64;                         // u8[8][32][4]

// Before an int4 panel's groups: what a column's minima are multiples of, f32[32], the multiples, s16[32][2] of each group, and
// its two blocks' steps, u8[32].
constexpr int64_t kInt4MinimaAt = 128, kInt4PairBytes = 128;
constexpr int64_t int4_steps_at(int64_t num_groups) { return kInt4MinimaAt + num_groups * kInt4PairBytes; }
constexpr int64_t int4_groups_at(int64_t num_groups) { return (int4_steps_at(num_groups) + num_groups * 32 + 63) / 64 * 64; }

// Steps fit into four bits, and a step times a nibble into eight.
constexpr int kMostStep = 15;

// A row's minima times sums of activations are added up as integers: no more than 2^31 - 1 when the minima are at most
// kMostMinimum and the sums' sizes add up to at most kMostSums, with half for each block that rounding may add.
constexpr int64_t kMostMinimum = 8191, kMostSums = 240000, kMostK = 1 << 20;
static_assert(kMostMinimum * (kMostSums + kMostK / 64 + 1000) < 1ll << 31, "sums of minima must not overflow");

// What is added to weight k of every column, in steps, before the screen rounds it (see derive_screen()):
// uniform in [-0.5, 0.5), and as good as drawn at random.
static inline __attribute__((always_inline, unused)) float screen_dither(uint32_t k) {
  uint32_t x = (k + 1) * 0x9e3779b9u;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return static_cast<float>((x ^ x >> 16) >> 8) * 0x1p-24f - 0.5f;
}

}  // namespace fused
}  // namespace fastengine
