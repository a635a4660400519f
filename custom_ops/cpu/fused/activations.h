// Rows of activations as the GEMM kernels read them.
#pragma once

#include "../kernels/simd.h"
#include "views.h"

namespace fastengine {
namespace FE_ISA {

using namespace fused;

// Tiles of up to 12 rows. In a tile of R rows, four consecutive k's of a row are one dword:
//
//   values  [k / 4][R][4] s8      scales, starts  [k / group][R]
//
// `starts` is -128 times the sum of a group's values: it cancels the 128 that weights are stored with.
// A float32 linear reads `rows` instead.
struct Activations {
  int64_t num_rows, padded_k, group;
  bool quantized;
  int8_t* values;
  float* scales;
  int32_t* starts;
  float* rows;  // [num_rows][padded_k]
};

FE_INLINE int64_t rows_of_tile(int64_t num_rows, int64_t tile) { return min_i(kTileRows, num_rows - tile * kTileRows); }

// Quantizes 32 values at a time, `group` / 32 chunks sharing a scale: x = scale * q, |q| <= 127. Values
// at and after `k` count as zero. `x` need not be padded.
void quantize_row(const float* x, int64_t k, int64_t row, const Activations& out);
// One group of one row; x holds `group` floats.
void quantize_group(const float* x, int64_t row, int64_t group_index, const Activations& out);

}  // namespace FE_ISA
}  // namespace fastengine
