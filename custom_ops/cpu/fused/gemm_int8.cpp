// Panels of the int8 layout.
#include "gemm_int.h"

namespace fastengine {
namespace FE_ISA {
namespace {

#if !defined(FE_HAS_DOTS)
FE_INLINE IVec less_128(IVec bytes) { return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128)); }
#endif

// 32 k's of kAtOnce vectors of columns.
struct Int8Block {
  IVec quads[kQuads][kAtOnce];
  Vec scales[kAtOnce], offsets[kAtOnce];
#if !defined(FE_HAS_DOTS)
  IVec sizes[kQuads][kAtOnce];  // |quads|, which are less 128 then
#endif

  template <int kRows>
  __attribute__((always_inline)) void sum(const BlockRows& x, int64_t stride, IVec (&sums)[kRows][kAtOnce]) const {
#if defined(FE_HAS_DOTS)
    for (int r = 0; r < kRows; ++r) {
      for (int u = 0; u < kAtOnce; ++u) sums[r][u] = iset(x.starts[r]);
    }
    add_block<kRows>(quads, x, stride, sums);
#else
    for (int r = 0; r < kRows; ++r) {
      for (int u = 0; u < kAtOnce; ++u) sums[r][u] = iset(kMagicBits);
    }
    const IVec(*quad)[kAtOnce] = quads, (*size)[kAtOnce] = sizes;
    const int32_t* values = x.values;
    for (int q = 0; q < kQuads; ++q, ++quad, ++size, values += stride) {
      asm("" : "+r"(quad), "+r"(size), "+r"(values));  // as in sum_shorts()
      IVec w[kAtOnce], sizes_of[kAtOnce];
      for (int u = 0; u < kAtOnce; ++u) w[u] = iload(&(*quad)[u]), sizes_of[u] = iload(&(*size)[u]);
      for (int r = 0; r < kRows; ++r) {
        const IVec value = iset(values[r]);
        for (int u = 0; u < kAtOnce; ++u) add_signed_dots(sums[r][u], sizes_of[u], w[u], value);
      }
    }
#endif
  }

  template <int kRows>
  __attribute__((always_inline)) void add(const BlockRows& x, int64_t stride) const {
    IVec sums[kRows][kAtOnce];
    sum<kRows>(x, stride, sums);
    for (int r = 0; r < kRows; ++r) {
      const Vec scale = vset(x.scales[r]);
      for (int u = 0; u < kAtOnce; ++u) add_scaled(as_floats(sums[r][u]), scales[u], offsets[u], scale, x.out + r * kPanel + u * kLanes);
    }
  }
};

FE_INLINE Int8Block load_block(const uint8_t* block, int64_t column) {
  Int8Block w;
  for (int u = 0; u < kAtOnce; ++u) {
    const int64_t at = column + u * kLanes;
    w.scales[u] = halves(block + kScalesAt + at * 2);
    w.offsets[u] = offset_of(w.scales[u]);
    for (int q = 0; q < kQuads; ++q) {
      const uint8_t* const quads = block + kInt8ValuesAt + (q * kPanel + at) * 4;
      if (begins_line(at)) ask_ahead(quads);
      w.quads[q][u] = iload(quads);
#if !defined(FE_HAS_DOTS)
      w.quads[q][u] = less_128(w.quads[q][u]);
      w.sizes[q][u] = _mm256_abs_epi8(w.quads[q][u]);
#endif
    }
  }
  return w;
}

}  // namespace

void int8_panel(const uint8_t* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, float* out) {
  const int64_t num_blocks = a.padded_k / kBlockK, num_rows = rows_of_tiles(a, first_tile, num_tiles);
  for (int64_t i = 0; i < num_rows * kPanel; i += kLanes) vstore(out + i, vzero());
  for (int64_t b = 0; b < num_blocks; ++b, panel += kInt8BlockBytes) {
    ask_ahead(panel);
    for (int64_t column = 0; column < kPanel; column += kColumnsAtOnce) add_tiles(load_block(panel, column), a, b, first_tile, num_tiles, out + column, nullptr);
  }
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
      const Vec scales = halves(block + kScalesAt + column * 2), offsets = offset_of(scales);
      IVec quads[kQuads];
      for (int q = 0; q < kQuads; ++q) quads[q] = iload(block + kInt8ValuesAt + (q * kPanel + column) * 4);
      const int32_t* const values = reinterpret_cast<const int32_t*>(a.values) + b * kQuads * num_rows;
#if defined(FE_HAS_DOTS)
      const auto sum_of = [&](int64_t r) __attribute__((always_inline)) {
        IVec sums = iset(a.starts[at + r]);
        for (int q = 0; q < kQuads; ++q) add_dots(sums, quads[q], iset(values[q * num_rows + r]));
        return sums;
      };
#else
      IVec sizes[kQuads];
      for (int q = 0; q < kQuads; ++q) quads[q] = less_128(quads[q]), sizes[q] = _mm256_abs_epi8(quads[q]);
      const auto sum_of = [&](int64_t r) __attribute__((always_inline)) {
        IVec sums = iset(kMagicBits);
        for (int q = 0; q < kQuads; ++q) add_signed_dots(sums, sizes[q], quads[q], iset(values[q * num_rows + r]));
        return sums;
      };
#endif
      for (int64_t r = 0; r < num_rows; ++r) {
        const IVec sums = sum_of(r);
        add_scaled(as_floats(sums), scales, offsets, vset(a.scales[at + r]), out + r * kStrip + u * kLanes);
      }
    }
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
