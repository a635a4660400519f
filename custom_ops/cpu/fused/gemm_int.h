// What the GEMMs of int8 and int4 weights share: a block of weights stays in registers while all rows pass by.
#pragma once

#include "dot.h"
#include "gemm.h"
#include "layouts.h"

namespace fastengine {
namespace FE_ISA {

constexpr int kQuads = kBlockK / 4;
// Vectors of columns, and rows, whose sums are in registers together, as measured: with AVX-VNNI a single row gains a fourth from
// values that are spread once for all of a panel's columns, and many rows nothing from other shapes.
#if defined(__AVXVNNI__)
constexpr int kAtOnce = kPanel / kLanes, kMaxRows = 2;
#else
constexpr int kAtOnce = 2, kMaxRows = 4;
#endif
constexpr int64_t kColumnsAtOnce = kAtOnce * kLanes;
// Whether four k's of a column begin a cache line.
FE_INLINE bool begins_line(int64_t column) { return column % 16 == 0; }

#if defined(__AVX512F__)
FE_INLINE Vec as_floats(IVec x) { return _mm512_castsi512_ps(x); }
#else
FE_INLINE Vec as_floats(IVec x) { return _mm256_castsi256_ps(x); }
#endif

// What kMagic in a sum comes to, to be added to the scaled sum: exact, as scales are f16 and steps have four bits.
FE_INLINE Vec offset_of(Vec scale) { return vmul(scale, vset(-kMagic)); }

// One block's activations of a tile from one row on, and where that row's results are.
struct BlockRows {
  const int32_t* values;  // [quad][rows of the tile]
  const float* scales;
  const int32_t* starts;
  float* out;        // [kPanel] a row
  int32_t* partial;  // [kColumnsAtOnce] a row, or null

  __attribute__((always_inline)) void advance(int64_t rows) {
    values += rows, scales += rows, starts += rows;
    out += rows * kPanel;
    if (partial != nullptr) partial += rows * kColumnsAtOnce;
  }
};

// out += a sum with kMagic in it, less that, scaled by the weights and then by the activations.
FE_INLINE void add_scaled(Vec sum, Vec scale, Vec offset, Vec row_scale, float* out) { vstore(out, vfma(vfma(sum, scale, offset), row_scale, vload(out))); }

#if defined(FE_HAS_DOTS)
// sums += a block of weights . that of kRows rows.
template <int kRows>
FE_INLINE void add_block(const IVec (&quads)[kQuads][kAtOnce], const BlockRows& x, int64_t stride, IVec (&sums)[kRows][kAtOnce]) {
  for (int q = 0; q < kQuads; ++q) {
    for (int r = 0; r < kRows; ++r) add_dots_of(sums[r], quads[q], x.values + q * stride + r);
  }
}
#endif

// A Block has `template <int kRows> void add(const BlockRows&, int64_t stride) const`; `stride`: the rows of the tile.
template <typename Block>
FE_INLINE void add_tile(const Block& w, BlockRows x, int64_t rows) {
  int64_t left = rows;
  for (; left >= kMaxRows; left -= kMaxRows) w.template add<kMaxRows>(x, rows), x.advance(kMaxRows);
  if (kMaxRows > 3 && left == 3) w.template add<3>(x, rows);
  if (kMaxRows > 2 && left == 2) w.template add<2>(x, rows);
  if (left == 1) w.template add<1>(x, rows);
}

// A tile of a number of rows that is known, and with it where the next block's values are.
template <int64_t kRows, typename Block>
FE_INLINE void add_tile_of(const Block& w, BlockRows x) {
#pragma GCC unroll 1
  for (int64_t r = 0; r < kRows; r += kMaxRows) {
    for (int64_t line = 0; line < kMaxRows / 2; ++line) __builtin_prefetch(x.values + kQuads * kRows + r * kQuads + line * 16);
    w.template add<kMaxRows>(x, kRows);
    x.advance(kMaxRows);
  }
}

// Of block b of all rows of the tiles; `out` and `partial` begin with the first tile's.
template <typename Block>
FE_INLINE void add_tiles(const Block& w, const Activations& a, int64_t b, int64_t first_tile, int64_t num_tiles, float* out, int32_t* partial) {
  const int64_t num_blocks = a.padded_k / kBlockK;
  for (int64_t tile = first_tile; tile < first_tile + num_tiles; ++tile) {
    const int64_t rows = rows_of_tile(a.num_rows, tile), row = tile * kTileRows, passed = row - first_tile * kTileRows;
    const BlockRows x{reinterpret_cast<const int32_t*>(a.values + row * a.padded_k) + b * kQuads * rows,
                      a.scales + row * a.num_groups() + b / a.group_blocks * rows,
                      a.starts + row * num_blocks + b * rows,
                      out + passed * kPanel,
                      partial != nullptr ? partial + passed * kColumnsAtOnce : nullptr};
    if (rows == kTileRows) {
      add_tile_of<kTileRows>(w, x);
    } else if (rows == kTileRows / 2) {
      add_tile_of<kTileRows / 2>(w, x);
    } else if (rows == 1) {
      w.template add<1>(x, 1);
    } else {
      add_tile(w, x, rows);
    }
  }
}

FE_INLINE int64_t rows_of_tiles(const Activations& a, int64_t first_tile, int64_t num_tiles) {
  return min_i(num_tiles * kTileRows, a.num_rows - first_tile * kTileRows);
}

}  // namespace FE_ISA
}  // namespace fastengine
