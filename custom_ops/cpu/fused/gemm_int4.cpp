// Panels of the int4 layout.
//
// A group's two blocks have integer steps and one scale: their sums of `step * nibble` are added up as integers, and only then
// become floats. Of many rows, nibbles are multiplied by their steps first, and the group's first block leaves its sums for the
// second one; of few, or where products of bytes have 16 bits only, the sums are. Both are exact, so they come to the same.
#include "gemm_int.h"

namespace fastengine {
namespace FE_ISA {
namespace {

// What becomes of a block's sums.
enum class Sums {
  kLeft,    // as they are, for kTaken
  kTaken,   // begins with those left, and adds to the output
  kByThemselves,
};

#if defined(__AVX512F__)
FE_INLINE IVec high_to_low(IVec x) { return bytes_and(_mm512_srli_epi16(x, 4), 15); }
FE_INLINE IVec twice_16(IVec x) { return _mm512_or_si512(x, _mm512_slli_epi32(x, 16)); }
#if defined(FE_HAS_DOTS)
FE_INLINE IVec times_low(IVec x, IVec steps) { return _mm512_mullo_epi16(x, steps); }
FE_INLINE IVec times_high(IVec x, IVec steps) { return _mm512_mulhi_epu16(x, _mm512_slli_epi16(steps, 12)); }
#endif
#else
FE_INLINE IVec high_to_low(IVec x) { return bytes_and(_mm256_srli_epi16(x, 4), 15); }
FE_INLINE IVec twice_16(IVec x) { return _mm256_or_si256(x, _mm256_slli_epi32(x, 16)); }
#if defined(FE_HAS_DOTS)
FE_INLINE IVec times_low(IVec x, IVec steps) { return _mm256_mullo_epi16(x, steps); }
FE_INLINE IVec times_high(IVec x, IVec steps) { return _mm256_mulhi_epu16(x, _mm256_slli_epi16(steps, 12)); }
#endif
#endif

// 32 k's of kAtOnce vectors of columns.
template <Sums kSums>
struct Int4Block {
  IVec quads[kQuads][kAtOnce];  // step * nibble; of products of 16 bits the nibbles
  Vec scales[kAtOnce], offsets[kAtOnce];
#if !defined(FE_HAS_DOTS)
  IVec steps[kAtOnce];
#endif

  template <int kRows>
  __attribute__((always_inline)) void add(const BlockRows& x, int64_t stride) const {
    IVec sums[kRows][kAtOnce];
    sum<kRows>(x, stride, sums);
    for (int r = 0; r < kRows; ++r) {
      const Vec scale = vset(kSums == Sums::kLeft ? 0.0f : x.scales[r]);
      for (int u = 0; u < kAtOnce; ++u) {
        if (kSums == Sums::kLeft) {
          istore(x.partial + r * kColumnsAtOnce + u * kLanes, sums[r][u]);
        } else {
          add_scaled(as_floats(sums[r][u]), scales[u], offsets[u], scale, x.out + r * kPanel + u * kLanes);
        }
      }
    }
  }

 private:
  __attribute__((always_inline)) static IVec start(const BlockRows& x, int r, int u) {
    return kSums == Sums::kTaken ? iload(x.partial + r * kColumnsAtOnce + u * kLanes) : iset(kMagicBits);
  }

  template <int kRows>
  __attribute__((always_inline)) void sum(const BlockRows& x, int64_t stride, IVec (&sums)[kRows][kAtOnce]) const {
#if defined(FE_HAS_DOTS)
    for (int r = 0; r < kRows; ++r) {
      for (int u = 0; u < kAtOnce; ++u) sums[r][u] = start(x, r, u);
    }
    add_block<kRows>(quads, x, stride, sums);
#else
    const auto load = [](const uint8_t* quad, int u) __attribute__((always_inline)) { return iload(quad + u * static_cast<int>(sizeof(IVec))); };
    sum_shorts<kRows, kAtOnce>(reinterpret_cast<const uint8_t*>(quads), sizeof(quads[0]), x.values, stride, load, sums);
    for (int r = 0; r < kRows; ++r) {
      for (int u = 0; u < kAtOnce; ++u) sums[r][u] = _mm256_add_epi32(start(x, r, u), _mm256_madd_epi16(sums[r][u], steps[u]));
    }
#endif
  }
};

template <Sums kSums>
FE_INLINE Int4Block<kSums> load_block(const uint8_t* group, const uint8_t* steps, int half, int64_t column) {
  Int4Block<kSums> w;
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t at = column + u * kLanes;
    w.scales[u] = halves(group + kScalesAt + at * 2);
    w.offsets[u] = offset_of(w.scales[u]);
    const IVec step = twice_16(steps_of(steps + at, half));
    for (int q = 0; q < kQuads; ++q) {
      const uint8_t* const quads = group + kInt4NibblesAt + (q * kPanel + at) * 4;
      if (begins_line(at) && q / (kQuads / 2) == half) ask_ahead(quads);
      const IVec pairs = iload(quads);
#if defined(FE_HAS_DOTS)
      w.quads[q][u] = half == 0 ? times_low(bytes_and(pairs, 0x0f), step) : times_high(bytes_and(pairs, 0xf0), step);
#else
      w.quads[q][u] = half == 0 ? bytes_and(pairs, 0x0f) : high_to_low(pairs);
#endif
    }
#if !defined(FE_HAS_DOTS)
    w.steps[u] = step;
#endif
  }
  return w;
}

// Where a panel's groups and their steps begin. Each way of passing over them is a function of its own: all in one are slower, by 2
// to 5 % of a decode.
struct Groups {
  const uint8_t *group, *steps;

  __attribute__((always_inline)) Groups at(int64_t g) const { return {group + g * kInt4GroupBytes, steps + g * kPanel}; }
};

// Blocks [first, last), each with a scale of its own activations.
__attribute__((noinline)) void add_alone(Groups groups, const Activations& a, int64_t first, int64_t last, int64_t first_tile, int64_t num_tiles, float* out) {
  for (int64_t b = first; b < last; ++b) {
    const auto [group, steps] = groups.at(b / 2);
    if (b % 2 == 0) ask_ahead(group);
    for (int64_t column = 0; column < kPanel; column += kColumnsAtOnce) {
      if (b % 2 == 0) {
        add_tiles(load_block<Sums::kByThemselves>(group, steps, 0, column), a, b, first_tile, num_tiles, out + column, nullptr);
      } else {
        add_tiles(load_block<Sums::kByThemselves>(group, steps, 1, column), a, b, first_tile, num_tiles, out + column, nullptr);
      }
    }
  }
}

__attribute__((noinline)) void add_together(Groups groups, const Activations& a, int64_t num_groups, int64_t first_tile, int64_t num_tiles, float* out) {
  alignas(64) int32_t partial[kChunkRows * kColumnsAtOnce];
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto [group, steps] = groups.at(g);
    ask_ahead(group);
    for (int64_t column = 0; column < kPanel; column += kColumnsAtOnce) {
      add_tiles(load_block<Sums::kLeft>(group, steps, 0, column), a, 2 * g, first_tile, num_tiles, out + column, partial);
      add_tiles(load_block<Sums::kTaken>(group, steps, 1, column), a, 2 * g + 1, first_tile, num_tiles, out + column, partial);
    }
  }
}

#if defined(FE_HAS_DOTS)
// Up to this many rows, their sums are multiplied by steps and not the nibbles.
#if defined(__AVX512F__)
constexpr int kFewRows = 4;
#else
constexpr int kFewRows = 1;
#endif

// A whole group of kRows rows, which are all there are. High nibbles stay where they are: they count 16 times.
template <int kRows>
FE_INLINE void add_few(const uint8_t* group, const uint8_t* steps, int64_t column, const Activations& a, int64_t g, float* out) {
  const int32_t* const values = reinterpret_cast<const int32_t*>(a.values) + g * 2 * kQuads * kRows;
  IVec low[kRows][kAtOnce], high[kRows][kAtOnce];
  for (int r = 0; r < kRows; ++r) {
    for (int u = 0; u < kAtOnce; ++u) low[r][u] = high[r][u] = iset(kMagicBits);
  }
  for (int q = 0; q < kQuads; ++q) {
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t at = column + u * kLanes;
      const uint8_t* const quads = group + kInt4NibblesAt + (q * kPanel + at) * 4;
      if (begins_line(at)) ask_ahead(quads);
      const IVec pairs = iload(quads);
      const IVec lows = bytes_and(pairs, 0x0f), highs = bytes_and(pairs, 0xf0);
      for (int r = 0; r < kRows; ++r) {
        add_dots(low[r][u], lows, iset(values[q * kRows + r]));
        add_dots(high[r][u], highs, iset(values[(kQuads + q) * kRows + r]));
      }
    }
  }
  const bool together = a.group_blocks == 2;
  const float* const scales = a.scales + (together ? g : 2 * g) * kRows;
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t at = column + u * kLanes;
    const Vec scale = halves(group + kScalesAt + at * 2);
    const Vec first = to_floats(steps_of(steps + at, 0)), second = vmul(to_floats(steps_of(steps + at, 1)), vset(1.0f / 16));
    for (int r = 0; r < kRows; ++r) {
      const Vec x = vfma(as_floats(low[r][u]), first, offset_of(first)), y = vfma(as_floats(high[r][u]), second, offset_of(second));
      float* const target = out + r * kPanel + u * kLanes;
      if (together) {
        vstore(target, vfma(vmul(vadd(x, y), scale), vset(scales[r]), vload(target)));
      } else {
        vstore(target, vfma(vmul(y, scale), vset(scales[kRows + r]), vfma(vmul(x, scale), vset(scales[r]), vload(target))));
      }
    }
  }
}

template <int kRows>
__attribute__((noinline)) void add_few_rows(Groups groups, const Activations& a, int64_t num_groups, float* out) {
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto [group, steps] = groups.at(g);
    ask_ahead(group);
    for (int64_t column = 0; column < kPanel; column += kColumnsAtOnce) add_few<kRows>(group, steps, column, a, g, out + column);
  }
}

FE_INLINE void add_few(Groups groups, const Activations& a, int64_t num_groups, float* out) {
  if (a.num_rows == 1) return add_few_rows<1>(groups, a, num_groups, out);
  if (kFewRows > 1 && a.num_rows == 2) return add_few_rows<2>(groups, a, num_groups, out);
  if (kFewRows > 2 && a.num_rows == 3) return add_few_rows<3>(groups, a, num_groups, out);
  if (kFewRows > 3) add_few_rows<4>(groups, a, num_groups, out);
}
#else
// Up to this many rows, which are one tile, nibbles are taken from where they lie.
constexpr int kFewRows = kTileRows;

// A whole group of rows [row, row + kRows).
template <int kRows, int kVecs>
FE_INLINE void add_few(const uint8_t* group, const uint8_t* steps, int64_t column, const Activations& a, int64_t g, int64_t row, float* out) {
  constexpr int kVecBytes = sizeof(IVec), kQuadBytes = kPanel * 4, kLines = kVecs * kVecBytes * kQuads / 64 / 2;  // to ask for with each half
  const auto low = [](const uint8_t* quad, int u) __attribute__((always_inline)) { return bytes_and(iload(quad + u * kVecBytes), 0x0f); };
  const auto high = [](const uint8_t* quad, int u) __attribute__((always_inline)) { return high_to_low(iload(quad + u * kVecBytes)); };
  const uint8_t *const nibbles = group + kInt4NibblesAt + column * 4, *line = group + kInt4NibblesAt + column / kLanes * kLines * 128;
  const auto ask = [&]() __attribute__((always_inline)) {
    for (int i = 0; row == 0 && i < kLines; ++i, line += 64) ask_ahead(line);
  };
  const int64_t stride = a.num_rows;
  const int32_t* const values = reinterpret_cast<const int32_t*>(a.values) + g * 2 * kQuads * stride + row;
  const bool together = a.group_blocks == 2;
  const float* const scales = a.scales + (together ? g : 2 * g) * stride + row;
  alignas(32) int32_t partial[kRows][kVecs * kLanes];
  IVec sums[kRows][kVecs];
  ask();
  sum_shorts<kRows, kVecs>(nibbles, kQuadBytes, values, stride, low, sums);
  for (int u = 0; u < kVecs; ++u) {
    const IVec step = twice_16(steps_of(steps + column + u * kLanes, 0));
    for (int r = 0; r < kRows; ++r) istore(partial[r] + u * kLanes, _mm256_add_epi32(iset(kMagicBits), _mm256_madd_epi16(sums[r][u], step)));
  }
  ask();
  sum_shorts<kRows, kVecs>(nibbles, kQuadBytes, values + kQuads * stride, stride, high, sums);
  for (int u = 0; u < kVecs; ++u) {
    const int64_t at = column + u * kLanes;
    const IVec step = twice_16(steps_of(steps + at, 1));
    const Vec scale = halves(group + kScalesAt + at * 2), offset = offset_of(scale);
    for (int r = 0; r < kRows; ++r) {
      float* const target = out + (row + r) * kPanel + u * kLanes;
      const IVec first = iload(partial[r] + u * kLanes), second = _mm256_madd_epi16(sums[r][u], step);
      if (together) {
        add_scaled(as_floats(_mm256_add_epi32(first, second)), scale, offset, vset(scales[r]), target);
      } else {
        add_scaled(as_floats(first), scale, offset, vset(scales[r]), target);
        add_scaled(as_floats(_mm256_add_epi32(iset(kMagicBits), second)), scale, offset, vset(scales[stride + r]), target);
      }
    }
  }
}

template <int kRows, int kVecs>
__attribute__((noinline)) void add_few_rows(Groups groups, const Activations& a, int64_t num_groups, int64_t row, float* out) {
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto [group, steps] = groups.at(g);
    ask_ahead(group);
    for (int64_t column = 0; column < kPanel; column += kVecs * kLanes) add_few<kRows, kVecs>(group, steps, column, a, g, row, out + column);
  }
}

FE_INLINE void add_few(Groups groups, const Activations& a, int64_t num_groups, float* out) {
  for (int64_t row = 0; row < a.num_rows; row += 8) {
    switch (a.num_rows - row) {
      case 1: return add_few_rows<1, 4>(groups, a, num_groups, row, out);
      case 2: return add_few_rows<2, 4>(groups, a, num_groups, row, out);
      case 3: return add_few_rows<3, 2>(groups, a, num_groups, row, out);
      case 4: return add_few_rows<4, 2>(groups, a, num_groups, row, out);
      case 5: return add_few_rows<5, 2>(groups, a, num_groups, row, out);
      case 6: return add_few_rows<6, 2>(groups, a, num_groups, row, out);
      case 7: return add_few_rows<7, 1>(groups, a, num_groups, row, out);
      default: add_few_rows<8, 1>(groups, a, num_groups, row, out);  // as many as there are registers for
    }
  }
}
#endif

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
    for (int64_t column = 0; column < kPanel; column += kColumnsAtOnce) {
      const int32_t* const pairs = a.sum_pairs + tile * num_pairs;
      const float* const units = a.sum_units + tile;
      float* const target = out + (tile - first_row) * kPanel + column;
      int64_t r = 0;
      for (; r + kTogether <= rows; r += kTogether) minima_of_rows<kTogether>(panel, column, pairs + r, units + r, num_pairs, rows, target + r * kPanel);
      for (; r < rows; ++r) minima_of_rows<1>(panel, column, pairs + r, units + r, num_pairs, rows, target + r * kPanel);
    }
  }
}

}  // namespace

void int4_panel(const uint8_t* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, float* out) {
  const int64_t num_blocks = a.padded_k / kBlockK, num_groups = ceil_div(num_blocks, 2), header_bytes = int4_groups_at(num_groups);
  for (int64_t line = 0; line < header_bytes; line += 64) ask_ahead(panel + line);
  start_with_minima(panel, a, first_tile * kTileRows, rows_of_tiles(a, first_tile, num_tiles), out);
  const Groups groups{panel + header_bytes, panel + int4_steps_at(num_groups)};
  int64_t done = num_blocks / 2 * 2;
  if (a.num_rows <= kFewRows) {
    add_few(groups, a, done / 2, out);
  } else if (a.group_blocks == 2) {
    add_together(groups, a, done / 2, first_tile, num_tiles, out);
  } else {
    done = 0;
  }
  if (done < num_blocks) add_alone(groups, a, done, num_blocks, first_tile, num_tiles, out);
}

}  // namespace FE_ISA
}  // namespace fastengine
