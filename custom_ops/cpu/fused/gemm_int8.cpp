// Tiles of the int8 layout. The order of float additions is the same for every number of rows.
#include "dot.h"
#include "gemm.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int kVecs = kPanel / kLanes;      // accumulators per row and panel
constexpr int kVecsAtOnce = 2;              // of which this many are in registers
constexpr int64_t kStepBytes = kPanel * 4;  // weights of four k's
constexpr int64_t kAhead = 1024;

template <int kRows>
void tile_rows(const uint8_t* panel, const int32_t* values, const float* scales, const int32_t* starts, int64_t num_groups, int64_t steps, float* out) {
  for (int v = 0; v < kVecs; v += kVecsAtOnce) {
    const uint8_t* weights = panel + v * kLanes * 4;
    const int32_t* dwords = values;
    for (int64_t g = 0; g < num_groups; ++g) {
      IVec sums[kRows][kVecsAtOnce];
      for (int r = 0; r < kRows; ++r) {
        for (int u = 0; u < kVecsAtOnce; ++u) sums[r][u] = iset(starts[g * kRows + r]);
      }
      for (int64_t s = 0; s < steps; ++s, weights += kStepBytes, dwords += kRows) {
        const IVec w0 = iload(weights), w1 = iload(weights + kLanes * 4);
        if (kRows <= 4) {
          __builtin_prefetch(weights + kAhead);
          __builtin_prefetch(weights + kAhead + 64);
        }
        for (int r = 0; r < kRows; ++r) {
          const IVec x = iset(dwords[r]);
          add_dots(sums[r][0], w0, x);
          add_dots(sums[r][1], w1, x);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int u = 0; u < kVecsAtOnce; ++u) {
          float* const target = out + r * kPanel + (v + u) * kLanes;
          const Vec before = g == 0 ? vzero() : vload(target);
          vstore(target, vfma(to_floats(sums[r][u]), vset(scales[g * kRows + r]), before));
        }
      }
    }
  }
}

}  // namespace

void int8_tile(const uint8_t* panel, const Activations& a, int64_t tile, float* out) {
  const int64_t num_groups = a.padded_k / a.group, first = tile * kTileRows;
  const int32_t* const values = reinterpret_cast<const int32_t*>(a.values + first * a.padded_k);
  const float* const scales = a.scales + first * num_groups;
  const int32_t* const starts = a.starts + first * num_groups;
#define FE_ROWS(n) \
  case n: return tile_rows<n>(panel, values, scales, starts, num_groups, a.group / 4, out)
  switch (rows_of_tile(a.num_rows, tile)) {
    FE_ROWS(1);
    FE_ROWS(2);
    FE_ROWS(3);
    FE_ROWS(4);
    FE_ROWS(5);
    FE_ROWS(6);
    FE_ROWS(7);
    FE_ROWS(8);
    FE_ROWS(9);
    FE_ROWS(10);
    FE_ROWS(11);
    FE_ROWS(12);
  }
#undef FE_ROWS
}

}  // namespace FE_ISA
}  // namespace fastengine
