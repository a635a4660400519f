// Rows of activations as the GEMM kernels read them.
#pragma once

#include "../kernels/simd.h"
#include "views.h"

namespace fastengine {
namespace FE_ISA {

using namespace fused;

// Tiles of up to 16 rows. In a tile of R rows, four consecutive k's of a row are one dword:
//
//   values  [k / 4][R][4] s8      sums, starts  [k / 32][R]      scales  [k / 32][R], or of groups of two blocks [k / 64][R]
//
// A block's dot products are summed up as integers that begin at the bits of kMagic, and so are floats of
// kMagic plus the sum: one multiply-add takes that off and scales by the weights. `sums` are a block's values
// added up, scaled; `starts` are the bits of kMagic less 128 times the unscaled sum, which cancels the 128 that
// int8 weights are stored with. A float32 linear reads `rows` instead.
//
// The minima of int4 weights are multiplied by `sums` as integers of 16 bits, two blocks at a time: for that a
// thread makes `sum_pairs` [k / 64][R][2] s16, the sums in the row's own unit, `sum_units` [num_rows].
struct Activations {
  int64_t num_rows, padded_k;
  int64_t group_blocks;  // 1 or 2
  bool quantized;
  int8_t* values;
  float *scales, *sums;
  int32_t* starts;
  float* rows;  // [num_rows][padded_k]
  int32_t* sum_pairs;
  float* sum_units;

  __attribute__((always_inline)) int64_t num_groups() const { return ceil_div(padded_k / kBlockK, group_blocks); }
};

constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: sums within 2^22 of it are exact
constexpr int32_t kMagicBits = 0x4b400000;

FE_INLINE int64_t rows_of_tile(int64_t num_rows, int64_t tile) { return min_i(kTileRows, num_rows - tile * kTileRows); }

// What becomes the rows of one tile: value i of row r is x[r * stride + i - first], for i below k; with
// `weight`, each is multiplied by its row's factor and then by its column's weight.
struct TileSource {
  const float* x;
  int64_t stride, first, k;
  const float* weight;
  float factors[kTileRows];
};

// Quantizes groups [first_group, last_group) of a tile's rows: x = scale * q, |q| <= 127. Values at and
// after `k` count as zero and are not read. What a row becomes does not depend on the others.
void quantize_tile(const TileSource& source, int64_t tile, int64_t first_group, int64_t last_group, const Activations& out);

// Fills sum_pairs and sum_units, once all of a row's blocks are there, in memory of sum_pairs_bytes().
int64_t sum_pairs_bytes(int64_t num_rows, int64_t padded_k);
void make_sum_pairs(Activations* a, uint8_t* memory);

}  // namespace FE_ISA
}  // namespace fastengine
