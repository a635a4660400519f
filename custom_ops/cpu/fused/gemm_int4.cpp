// The 4-bit layout: expansion to int8, in registers for few rows, to a buffer for more (see pack.h).
#include "dot.h"
#include "gemm.h"
#include "int4_layout.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int kVecs = kPanel / kLanes;
constexpr int64_t kAhead = 1216;

#if defined(__AVX512F__)
FE_INLINE IVec wide_scales(const uint16_t* p) {
  const IVec x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_or_si512(x, _mm512_slli_epi32(x, 16));
}
FE_INLINE IVec wide_offsets(const uint8_t* p) {
  const IVec x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_shuffle_epi8(x, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
}
// (first * factor >> 8) in each low byte, (second * factor >> 8) in each high byte, plus offsets.
FE_INLINE IVec expand(IVec high_nibbles, IVec low_nibbles, IVec factor, IVec offsets) {
  const IVec low = _mm512_mulhi_epu16(_mm512_and_si512(high_nibbles, _mm512_set1_epi16(0x0f00)), factor);
  const IVec high = _mm512_mullo_epi16(_mm512_and_si512(low_nibbles, _mm512_set1_epi16(0x000f)), factor);
  // low | (high & 0xff00)
  return _mm512_add_epi8(_mm512_ternarylogic_epi32(low, high, _mm512_set1_epi16(static_cast<short>(0xff00)), 0xf8), offsets);
}
FE_INLINE IVec shift4(IVec x) { return _mm512_srli_epi16(x, 4); }
#else
FE_INLINE IVec wide_scales(const uint16_t* p) {
  const IVec x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_or_si256(x, _mm256_slli_epi32(x, 16));
}
FE_INLINE IVec wide_offsets(const uint8_t* p) {
  const IVec x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i spread = _mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(spread));
}
FE_INLINE IVec expand(IVec high_nibbles, IVec low_nibbles, IVec factor, IVec offsets) {
  const IVec low = _mm256_mulhi_epu16(_mm256_and_si256(high_nibbles, _mm256_set1_epi16(0x0f00)), factor);
  const IVec high = _mm256_mullo_epi16(_mm256_and_si256(low_nibbles, _mm256_set1_epi16(0x000f)), factor);
  return _mm256_add_epi8(_mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi16(static_cast<short>(0xff00)))), offsets);
}
FE_INLINE IVec shift4(IVec x) { return _mm256_srli_epi16(x, 4); }
#endif

template <int kRows, int kAtOnce>
FE_INLINE void direct_vecs(const uint8_t* panel, int first_vec, const int32_t* values, const float* scales, const int32_t* starts, const Activations& a, float* out) {
  Vec totals[kRows][kAtOnce];
  IVec sums[kRows][kAtOnce];
  const int64_t halves = a.padded_k / 32, halves_per_group = a.group / 32;
  for (int64_t h = 0, left = 0, g = -1; h < halves; ++h, --left) {
    if (left == 0) {
      ++g;
      left = halves_per_group;
      for (int r = 0; r < kRows; ++r) {
        for (int u = 0; u < kAtOnce; ++u) sums[r][u] = iset(starts[g * kRows + r]);
      }
    }
    const uint8_t* const block = panel + h / 2 * kInt4BlockBytes;
    const uint8_t* const nibbles = block + kInt4Nibbles + h % 2 * 512;
    for (int line = 0; line < 10; ++line) __builtin_prefetch(nibbles + kAhead + line * 64);
    for (int u = 0; u < kAtOnce; ++u) {
      const int64_t column = (first_vec + u) * kLanes;
      const IVec factor = wide_scales(reinterpret_cast<const uint16_t*>(block + kInt4Scales) + h % 2 * kPanel + column);
      const IVec offsets = wide_offsets(block + kInt4Offsets + h % 2 * kPanel + column);
      for (int i = 0; i < 4; ++i) {
        const IVec raw = iload(nibbles + i * 128 + column * 4);
        const IVec shifted = shift4(raw);
        const IVec w0 = expand(raw, raw, factor, offsets), w1 = expand(shifted, shifted, factor, offsets);
        const int32_t* const x = values + (h * 8 + 2 * i) * kRows;
        for (int r = 0; r < kRows; ++r) {
          add_dots(sums[r][u], w0, iset(x[r]));
          add_dots(sums[r][u], w1, iset(x[kRows + r]));
        }
      }
    }
    if (left == 1) {
      for (int r = 0; r < kRows; ++r) {
        for (int u = 0; u < kAtOnce; ++u) totals[r][u] = vfma(to_floats(sums[r][u]), vset(scales[g * kRows + r]), g == 0 ? vzero() : totals[r][u]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int u = 0; u < kAtOnce; ++u) vstore(out + r * kPanel + (first_vec + u) * kLanes, totals[r][u]);
  }
}

template <int kRows>
void direct(const uint8_t* panel, const Activations& a, int64_t tile, float* out) {
  const int64_t num_groups = a.padded_k / a.group, first = tile * kTileRows;
  const int32_t* const values = reinterpret_cast<const int32_t*>(a.values + first * a.padded_k);
  for (int v = 0; v < kVecs; v += 2) {
    direct_vecs<kRows, 2>(panel, v, values, a.scales + first * num_groups, a.starts + first * num_groups, a, out);
  }
}

}  // namespace

void int4_tile(const uint8_t* panel, const Activations& a, int64_t tile, float* out) {
  switch (rows_of_tile(a.num_rows, tile)) {
    case 1: return direct<1>(panel, a, tile, out);
    case 2: return direct<2>(panel, a, tile, out);
    case 3: return direct<3>(panel, a, tile, out);
    default: return direct<4>(panel, a, tile, out);
  }
}

void expand_int4_panel(const uint8_t* panel, int64_t padded_k, uint8_t* out) {
  for (int64_t h = 0; h < padded_k / 32; ++h) {
    const uint8_t* const block = panel + h / 2 * kInt4BlockBytes;
    const uint8_t* const nibbles = block + kInt4Nibbles + h % 2 * 512;
    for (int64_t column = 0; column < kPanel; column += kLanes) {
      const IVec factor = wide_scales(reinterpret_cast<const uint16_t*>(block + kInt4Scales) + h % 2 * kPanel + column);
      const IVec offsets = wide_offsets(block + kInt4Offsets + h % 2 * kPanel + column);
      for (int i = 0; i < 4; ++i) {
        const IVec raw = iload(nibbles + i * 128 + column * 4);
        const IVec shifted = shift4(raw);
        uint8_t* const target = out + (h * 8 + 2 * i) * kPanel * 4 + column * 4;
        istore(target, expand(raw, raw, factor, offsets));
        istore(target + kPanel * 4, expand(shifted, shifted, factor, offsets));
      }
    }
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
