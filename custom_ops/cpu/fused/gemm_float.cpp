// Panels of the float32 layout, which checks the others: one sum per output, k from first to last.
#include "gemm.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int kVecs = kPanel / kLanes;
constexpr int kMaxRows = kLanes == 16 ? 6 : 2;

template <int kRows>
void float_rows(const float* panel, const float* rows, int64_t stride, int64_t k, float* out) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sums[r][v] = vzero();
  }
  for (int64_t i = 0; i < k; ++i, panel += kPanel) {
    Vec weights[kVecs];
    for (int v = 0; v < kVecs; ++v) weights[v] = vload(panel + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec x = vset(rows[r * stride + i]);
      for (int v = 0; v < kVecs; ++v) sums[r][v] = vfma(x, weights[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) vstore(out + r * kPanel + v * kLanes, sums[r][v]);
  }
}

}  // namespace

void float_panel(const float* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, int64_t k, float* out) {
  const int64_t first = first_tile * kTileRows, num_rows = min_i(num_tiles * kTileRows, a.num_rows - first);
  const float* const rows = a.rows + first * a.padded_k;
  int64_t r = 0;
  for (; r + kMaxRows <= num_rows; r += kMaxRows) float_rows<kMaxRows>(panel, rows + r * a.padded_k, a.padded_k, k, out + r * kPanel);
  for (; r < num_rows; ++r) float_rows<1>(panel, rows + r * a.padded_k, a.padded_k, k, out + r * kPanel);
}

}  // namespace FE_ISA
}  // namespace fastengine
