// Packing of weights, done once at load time.
//
// The 4-bit layout stores, for 64 k's of 32 columns (a super-block of 1216 bytes):
//
//   | scale u16[32] of k 0-31 | scale u16[32] of k 32-63 | offset u8[32] | offset u8[32] | nibbles 2 x 512 |
//
// and a weight is the unsigned byte  (nibble * scale >> 8) + offset, an exact integer, so every kernel
// sees the same int8 weights whether it expands them in registers or to a buffer first. Sums of
// products of integers don't depend on their order: a row's result is the same at any batch size.
//
// Nibbles of 64 bytes hold two vectors of four k's by 16 columns, A (k 8i .. 8i + 3) and B (k 8i + 4 ..
// 8i + 7), arranged for 16-bit multiplies: in each 16-bit lane, from the lowest nibble on, A's second
// byte, B's second, A's first, B's first.
#pragma once

#include <vector>

#include "int4_layout.h"
#include "model.h"

namespace fastengine {
namespace fused {

// Rows that come from one tensor of the checkpoint.
struct WeightPart {
  const uint8_t* data;   // row-major, each row contiguous in the format of `kind`
  SourceKind kind;
  int64_t rows;
  const int32_t* order;  // [rows]: source row of each packed row, or null for the order they lie in
};

// Bytes of one row of k weights. Throws std::invalid_argument when k is no multiple of the block.
int64_t row_bytes(SourceKind kind, int64_t k);

// Decodes one row to floats.
void decode_row(const uint8_t* row, SourceKind kind, int64_t k, float* out);

// Packs the rows of all parts one after the other; `paired` interleaves two parts of equal size by 16
// columns. kInt4 takes 4-bit sources only. Throws std::invalid_argument.
Linear pack_linear(const std::vector<WeightPart>& parts, int64_t k, Layout layout, int64_t group, bool paired, const float* bias);

// Row n of a packed matrix as floats [k].
void unpack_row(const Linear& linear, int64_t n, float* out);

}  // namespace fused
}  // namespace fastengine
