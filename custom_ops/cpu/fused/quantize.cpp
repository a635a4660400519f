// Dynamic quantization of activations into the GEMM's tile order.
#include "activations.h"

namespace fastengine {
namespace FE_ISA {
namespace {

Vec vabs(Vec x) { return vmax(x, vsub(vzero(), x)); }

// Rounds kLanes values to s8 and returns their sum; dwords go `stride` dwords apart.
FE_INLINE int32_t store_quantized(Vec x, Vec inverse, int32_t* out, int64_t stride) {
  alignas(16) int32_t dwords[4];
#if defined(__AVX512F__)
  const __m512i q = _mm512_cvtps_epi32(vmul(x, inverse));
  _mm_store_si128(reinterpret_cast<__m128i*>(dwords), _mm512_cvtsepi32_epi8(q));
  for (int i = 0; i < 4; ++i) out[i * stride] = dwords[i];
  return _mm512_reduce_add_epi32(q);
#else
  const __m256i q = _mm256_cvtps_epi32(vmul(x, inverse));
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  _mm_store_si128(reinterpret_cast<__m128i*>(dwords), _mm_packs_epi16(words, words));
  for (int i = 0; i < 2; ++i) out[i * stride] = dwords[i];
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), q);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + lanes[4] + lanes[5] + lanes[6] + lanes[7];
#endif
}

// `count` values of the group are given, the rest are zero.
FE_INLINE void quantize_part(const float* x, int64_t count, int64_t row, int64_t group_index, const Activations& out) {
  const int64_t tile = row / kTileRows, lane = row % kTileRows, num_rows = rows_of_tile(out.num_rows, tile);
  Vec most = vzero();
  for (int64_t i = 0; i < count; i += kLanes) most = vmax(most, vabs(vload_n(x + i, min_i(kLanes, count - i))));
  const float largest = vmaximum(most);
  const Vec inverse = vset(largest > 0.0f ? 127.0f / largest : 0.0f);
  int32_t* const values = reinterpret_cast<int32_t*>(out.values + tile * kTileRows * out.padded_k);
  int32_t sum = 0;
  for (int64_t i = 0; i < out.group; i += kLanes) {
    const int64_t lanes = max_i(0, min_i(kLanes, count - i));
    const Vec part = lanes == kLanes ? vload(x + i) : vload_n(x + i, lanes);
    sum += store_quantized(part, inverse, values + (group_index * out.group + i) / 4 * num_rows + lane, num_rows);
  }
  const int64_t at = tile * kTileRows * (out.padded_k / out.group) + group_index * num_rows + lane;
  out.scales[at] = largest * (1.0f / 127.0f);
  out.starts[at] = -128 * sum;
}

}  // namespace

void quantize_group(const float* x, int64_t row, int64_t group_index, const Activations& out) {
  quantize_part(x, out.group, row, group_index, out);
}

void quantize_row(const float* x, int64_t k, int64_t row, const Activations& out) {
  if (!out.quantized) {
    float* const target = out.rows + row * out.padded_k;
    for (int64_t i = 0; i < out.padded_k; i += kLanes) vstore(target + i, vload_n(x + i, max_i(0, min_i(kLanes, k - i))));
    return;
  }
  for (int64_t g = 0; g * out.group < out.padded_k; ++g) {
    quantize_part(x + g * out.group, max_i(0, min_i(out.group, k - g * out.group)), row, g, out);
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
