// Packing of weights, done once at load time.
//
// A block is 32 k's of 32 columns, each column with its own scale; of int4, two blocks are a group. Those of one panel follow each
// other.
//
//   int8   | scale f16[32] | u8[8][32][4]: value + 128 of four k's by 32 columns, eight times |
//   int4   | scale f16[32] | u8[8][32][4]: low nibbles are the first block's, four k's by 32 columns eight times, high ones the second's |
//
// An int4 weight is scale * step * nibble + minimum, with a step from 0 to 15 and a minimum of its block. Those of a panel
// lie before its groups, minima as products of pairs of 16-bit integers read them:
//
//   | unit f32[32] | minima s16[32][2]: of a group's blocks, in units | ... | steps u8[32]: low nibbles are the first block's | ...
//
// Q8_0 and Q4_0 weights are exact in int8. Q4_0 and Q4_1 weights keep their nibbles in int4; what two blocks' scales are to each other
// is off by half a percent in the mean (of a block with a scale far below its neighbour's nibbles are rounded anew), and minima by
// up to 1 / 16,000 of their column's largest. What else there is, is rounded.
#pragma once

#include "layouts.h"
#include "model.h"

namespace fastengine {
namespace fused {

// Rows of one tensor of the checkpoint.
struct WeightPart {
  const uint8_t* data;   // row-major, each row contiguous in the format of `kind`
  const int32_t* order;  // [rows]: source row of each packed row, or null for the order they lie in
  SourceKind kind;
  int64_t rows;
};

// Bytes of one row of k weights. Throws std::invalid_argument when k is no multiple of the block.
int64_t row_bytes(SourceKind kind, int64_t k);

// Decodes one row to floats, with the operations of the file format's definition.
void decode_row(const uint8_t* row, SourceKind kind, int64_t k, float* out);

// Fixes a linear's shape and its place in the arena; `paired` interleaves the two halves of its rows by
// 16 columns, `fine`: activations have a scale per block even where weights are int4. Throws std::invalid_argument.
void define_linear(Model* model, Linear* linear, int64_t rows, int64_t k, Layout layout, bool paired, bool has_bias, bool fine);

// Packs rows [first_row, first_row + part.rows) in place, whatever was there.
void pack_rows(const Linear& linear, uint8_t* arena, int64_t first_row, const WeightPart& part, int num_threads);

void set_bias(const Linear& linear, uint8_t* arena, int64_t first_row, const float* values, int64_t count);

// Packs rows [first_row, first_row + count) of `screen`, int4, from those of `head`, int8, which lie there already.
//
// A weight w becomes the nibble q nearest to (w - minimum) / step + dither, where dither depends on k alone, and stands for
// minimum + step * (q - dither). Whatever the weights are, its error is then uniform in [-step / 2, step / 2) and independent
// of the errors of the column's other weights, over the draw of the dithers (subtractive dithering, L. G. Roberts, 1962).
void derive_screen(const Linear& head, const Linear& screen, uint8_t* arena, int64_t first_row, int64_t count, int num_threads);

// Row n of a packed matrix, as the model counts rows, as floats [k].
void unpack_row(const Linear& linear, const uint8_t* arena, int64_t n, float* out);

// Sum over elements of bits[r, c] * row_keys[r] * column_keys[c] modulo 2^64, of the rows' float32 values.
uint64_t hash_rows(const WeightPart& part, int64_t k, const uint64_t* row_keys, const uint64_t* column_keys, int num_threads);

}  // namespace fused
}  // namespace fastengine
