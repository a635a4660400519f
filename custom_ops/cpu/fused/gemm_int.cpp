// Panels of the int8 and int4 layouts: a block of weights stays in registers while all rows pass by.
#include "dot.h"
#include "gemm.h"
#include "layouts.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int kVecs = kPanel / kLanes;
constexpr int kQuads = kBlockK / 4;
// Vectors of columns, and rows, whose sums are in registers together, as measured: with AVX-VNNI a single row gains a fourth from
// values that are spread once for all of a panel's columns, and many rows nothing from other shapes.
#if defined(__AVXVNNI__)
constexpr int kAtOnce = kPanel / kLanes, kMaxRows = 2;
#else
constexpr int kAtOnce = 2, kMaxRows = 4;
#endif

// 32 k's of kAtOnce vectors of columns. `offsets` are -kMagic times the scales, which is exact: scales are f16.
struct Weights {
  IVec quads[kQuads][kAtOnce];
  Vec scales[kAtOnce], offsets[kAtOnce];
#if !defined(FE_HAS_DOTS)
  IVec sizes[kQuads][kAtOnce];  // of 8 bits: |quads|, which are less 128 then
#endif
};

#if defined(__AVX512F__)
FE_INLINE IVec low_nibbles(IVec x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
FE_INLINE IVec high_nibbles(IVec x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
FE_INLINE Vec as_floats(IVec x) { return _mm512_castsi512_ps(x); }
#else
FE_INLINE IVec low_nibbles(IVec x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
FE_INLINE IVec high_nibbles(IVec x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
FE_INLINE Vec as_floats(IVec x) { return _mm256_castsi256_ps(x); }
#endif

template <int kBits>
FE_INLINE Weights load_weights(const uint8_t* block, int64_t column) {
  Weights w;
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t at = column + u * kLanes;
    w.scales[u] = halves(block + kScalesAt + at * 2);
    w.offsets[u] = vmul(w.scales[u], vset(-kMagic));
    if (kBits == 8) {
      for (int q = 0; q < kQuads; ++q) {
        w.quads[q][u] = iload(block + kInt8ValuesAt + (q * kPanel + at) * 4);
#if !defined(FE_HAS_DOTS)
        w.quads[q][u] = _mm256_xor_si256(w.quads[q][u], _mm256_set1_epi8(-128));
        w.sizes[q][u] = _mm256_abs_epi8(w.quads[q][u]);
#endif
      }
    } else {
      for (int q = 0; q < kQuads; q += 2) {
        const IVec pairs = iload(block + kInt4NibblesAt + (q / 2 * kPanel + at) * 4);
        w.quads[q][u] = low_nibbles(pairs);
        w.quads[q + 1][u] = high_nibbles(pairs);
      }
    }
  }
  return w;
}

// One block's activations of a tile, from one row on.
struct BlockRows {
  const int32_t* values;  // [quad][rows of the tile]
  const float* scales;
  const int32_t* starts;
};

// kMagicBits plus the dot products of kRows rows with a block; `stride`: the rows of the tile.
#if defined(FE_HAS_DOTS)
template <int kBits, int kRows>
FE_INLINE void sum_rows(const Weights& w, const BlockRows& x, int64_t stride, IVec (&sums)[kRows][kAtOnce]) {
  for (int r = 0; r < kRows; ++r) {
    for (int u = 0; u < kAtOnce; ++u) sums[r][u] = iset(kBits == 8 ? x.starts[r] : kMagicBits);
  }
  for (int q = 0; q < kQuads; ++q) {
    for (int r = 0; r < kRows; ++r) {
      const IVec value = iset(x.values[q * stride + r]);
      for (int u = 0; u < kAtOnce; ++u) add_dots(sums[r][u], w.quads[q][u], value);
    }
  }
}
#else
// In sums of 16 bits, which hold all 32 products of 4 bits (15 * 127 * 2 in each of 8 quads), and of 8 bits two, when the signs
// are the activations': 2 * 128 * 127.
template <int kBits, int kRows>
FE_INLINE void sum_rows(const Weights& w, const BlockRows& x, int64_t stride, IVec (&sums)[kRows][kAtOnce]) {
  const IVec ones = _mm256_set1_epi16(1);
  for (int r = 0; r < kRows; ++r) {
    for (int u = 0; u < kAtOnce; ++u) sums[r][u] = iset(kBits == 8 ? kMagicBits : 0);
  }
  for (int q = 0; q < kQuads; ++q) {
    for (int r = 0; r < kRows; ++r) {
      const IVec value = iset(x.values[q * stride + r]);
      for (int u = 0; u < kAtOnce; ++u) {
        if (kBits == 4) {
          sums[r][u] = _mm256_add_epi16(sums[r][u], _mm256_maddubs_epi16(w.quads[q][u], value));
        } else {
          const IVec pairs = _mm256_maddubs_epi16(w.sizes[q][u], _mm256_sign_epi8(value, w.quads[q][u]));
          sums[r][u] = _mm256_add_epi32(sums[r][u], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
  }
  for (int r = 0; kBits == 4 && r < kRows; ++r) {
    for (int u = 0; u < kAtOnce; ++u) sums[r][u] = _mm256_add_epi32(iset(kMagicBits), _mm256_madd_epi16(sums[r][u], ones));
  }
}
#endif

template <int kBits, int kRows>
FE_INLINE void add_rows(const Weights& w, const BlockRows& x, int64_t stride, float* out) {
  IVec sums[kRows][kAtOnce];
  sum_rows<kBits, kRows>(w, x, stride, sums);
  for (int r = 0; r < kRows; ++r) {
    const Vec scale = vset(x.scales[r]);
    for (int u = 0; u < kAtOnce; ++u) {
      float* const target = out + r * kPanel + u * kLanes;
      vstore(target, vfma(vfma(as_floats(sums[r][u]), w.scales[u], w.offsets[u]), scale, vload(target)));
    }
  }
}

template <int kBits>
FE_INLINE void add_tile(const Weights& w, BlockRows x, int64_t rows, float* out) {
  int64_t left = rows;
  const auto advance = [&](int64_t n) {
    x.values += n, x.scales += n, x.starts += n;
    out += n * kPanel, left -= n;
  };
  for (; left >= kMaxRows; advance(kMaxRows)) add_rows<kBits, kMaxRows>(w, x, rows, out);
  if (kMaxRows > 3 && left == 3) add_rows<kBits, 3>(w, x, rows, out);
  if (kMaxRows > 2 && left == 2) add_rows<kBits, 2>(w, x, rows, out);
  if (left == 1) add_rows<kBits, 1>(w, x, rows, out);
}

// A tile of a number of rows that is known, and with it where the next block's values are.
template <int kBits, int64_t kRows>
FE_INLINE void add_tile_of(const Weights& w, BlockRows x, float* out) {
#pragma GCC unroll 1
  for (int64_t r = 0; r < kRows; r += kMaxRows) {
    for (int64_t line = 0; line < kMaxRows / 2; ++line) __builtin_prefetch(x.values + kQuads * kRows + r * kQuads + line * 16);
    add_rows<kBits, kMaxRows>(w, x, kRows, out);
    x.values += kMaxRows, x.scales += kMaxRows, x.starts += kMaxRows;
    out += kMaxRows * kPanel;
  }
}

// out = the minima times the sums of activations, of up to kRows rows of a tile.
template <int kRows>
FE_INLINE void minima_of_rows(const uint8_t* panel, int64_t column, const int32_t* pairs, const float* units, int64_t num_pairs, int64_t stride, float* out) {
  IVec sums[kRows][kAtOnce];
  for (int r = 0; r < kRows; ++r) {
    for (int u = 0; u < kAtOnce; ++u) sums[r][u] = iset(0);
  }
  for (int64_t p = 0; p < num_pairs; ++p) {
    const uint8_t* const at = panel + kInt4MinimaAt + p * kInt4PairBytes + column * 4;
    IVec minima[kAtOnce];
    for (int u = 0; u < kAtOnce; ++u) minima[u] = iload(at + u * kLanes * 4);
    for (int r = 0; r < kRows; ++r) {
      const IVec pair = iset(pairs[p * stride + r]);
      for (int u = 0; u < kAtOnce; ++u) add_pairs(sums[r][u], minima[u], pair);
    }
  }
  for (int u = 0; u < kAtOnce; ++u) {
    const Vec unit = vload(reinterpret_cast<const float*>(panel) + column + u * kLanes);
    for (int r = 0; r < kRows; ++r) vstore(out + r * kPanel + u * kLanes, vmul(to_floats(sums[r][u]), vmul(unit, vset(units[r]))));
  }
}

FE_INLINE void start_with_minima(const uint8_t* panel, const Activations& a, int64_t first_row, int64_t num_rows, float* out) {
  constexpr int64_t kTogether = kLanes == 16 ? 8 : kMaxRows;
  const int64_t num_pairs = ceil_div(a.padded_k / kBlockK, 2);
  for (int64_t tile = first_row; tile < first_row + num_rows; tile += kTileRows) {
    const int64_t rows = min_i(kTileRows, a.num_rows - tile);
    for (int v = 0; v < kVecs; v += kAtOnce) {
      const int32_t* const pairs = a.sum_pairs + tile * num_pairs;
      const float* const units = a.sum_units + tile;
      float* const target = out + (tile - first_row) * kPanel + v * kLanes;
      int64_t r = 0;
      for (; r + kTogether <= rows; r += kTogether) minima_of_rows<kTogether>(panel, v * kLanes, pairs + r, units + r, num_pairs, rows, target + r * kPanel);
      for (; r < rows; ++r) minima_of_rows<1>(panel, v * kLanes, pairs + r, units + r, num_pairs, rows, target + r * kPanel);
    }
  }
}

template <int kBits>
FE_INLINE void panel_rows(const uint8_t* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, float* out) {
  constexpr int64_t kBytes = kBits == 8 ? kInt8BlockBytes : kInt4BlockBytes;
  // Far enough for a single row, which is through with a block in some ten nanoseconds. What a panel's last
  // blocks ask for is the start of the next one, which the same thread takes.
  constexpr int64_t kAhead = 9 * kInt4BlockBytes;
  const int64_t num_blocks = a.padded_k / kBlockK, total_rows = min_i(num_tiles * kTileRows, a.num_rows - first_tile * kTileRows);
  if (kBits == 4) {
    const int64_t header_bytes = int4_blocks_at(num_blocks);
    for (int64_t line = 0; line < header_bytes; line += 64) __builtin_prefetch(panel + kAhead + line);
    start_with_minima(panel, a, first_tile * kTileRows, total_rows, out);
    panel += header_bytes;
  } else {
    for (int64_t i = 0; i < total_rows * kPanel; i += kLanes) vstore(out + i, vzero());
  }
  for (int64_t b = 0; b < num_blocks; ++b, panel += kBytes) {
    for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(panel + kAhead + line);
    for (int v = 0; v < kVecs; v += kAtOnce) {
      const Weights w = load_weights<kBits>(panel, v * kLanes);
      for (int64_t tile = first_tile; tile < first_tile + num_tiles; ++tile) {
        const int64_t rows = rows_of_tile(a.num_rows, tile), row = tile * kTileRows, at = row * num_blocks + b * rows;
        const BlockRows x{reinterpret_cast<const int32_t*>(a.values + row * a.padded_k) + b * kQuads * rows, a.scales + at, a.starts + at};
        float* const target = out + (row - first_tile * kTileRows) * kPanel + v * kLanes;
        if (rows == kTileRows) {
          add_tile_of<kBits, kTileRows>(w, x, target);
        } else if (rows == kTileRows / 2) {
          add_tile_of<kBits, kTileRows / 2>(w, x, target);
        } else if (rows == 1) {
          add_rows<kBits, 1>(w, x, 1, target);
        } else {
          add_tile<kBits>(w, x, rows, target);
        }
      }
    }
  }
}

}  // namespace

void int8_panel(const uint8_t* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, float* out) {
  panel_rows<8>(panel, a, first_tile, num_tiles, out);
}

void int4_panel(const uint8_t* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, float* out) {
  panel_rows<4>(panel, a, first_tile, num_tiles, out);
}

void int8_strip(const uint8_t* panel, int64_t strip, const Activations& a, float* out) {
  constexpr int64_t kAhead = 6;
  constexpr int kStripVecs = kStrip / kLanes;
  const int64_t num_blocks = a.padded_k / kBlockK, num_rows = rows_of_tile(a.num_rows, 0);
  for (int64_t i = 0; i < num_rows * kStrip; i += kLanes) vstore(out + i, vzero());
  const auto ask_for = [&](int64_t block) {
    if (block >= num_blocks) return;
    const uint8_t* const p = panel + block * kInt8BlockBytes;
    __builtin_prefetch(p + kScalesAt);
    for (int q = 0; q < kQuads; ++q) __builtin_prefetch(p + kInt8ValuesAt + (q * kPanel + strip * kStrip) * 4);
  };
  for (int64_t b = 0; b < kAhead; ++b) ask_for(b);
  for (int64_t b = 0; b < num_blocks; ++b) {
    ask_for(b + kAhead);
    const uint8_t* const block = panel + b * kInt8BlockBytes;
    const int64_t at = b * num_rows;
    for (int u = 0; u < kStripVecs; ++u) {
      const int64_t column = strip * kStrip + u * kLanes;
      const Vec scales = halves(block + kScalesAt + column * 2), offsets = vmul(scales, vset(-kMagic));
      IVec quads[kQuads];
      for (int q = 0; q < kQuads; ++q) quads[q] = iload(block + kInt8ValuesAt + (q * kPanel + column) * 4);
      for (int64_t r = 0; r < num_rows; ++r) {
        IVec sums = iset(a.starts[at + r]);
        for (int q = 0; q < kQuads; ++q) add_dots(sums, quads[q], iset(reinterpret_cast<const int32_t*>(a.values)[(b * kQuads + q) * num_rows + r]));
        float* const target = out + r * kStrip + u * kLanes;
        vstore(target, vfma(vfma(as_floats(sums), scales, offsets), vset(a.scales[at + r]), vload(target)));
      }
    }
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
