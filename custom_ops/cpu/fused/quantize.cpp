// Dynamic quantization of activations into the GEMM's tile order.
#include "activations.h"

namespace fastengine {
namespace FE_ISA {
namespace {

Vec vabs(Vec x) { return vmax(x, vsub(vzero(), x)); }

// 32 values as s8, and their sum.
#if defined(__AVX512F__)
FE_INLINE int32_t to_bytes(const Vec* x, Vec inverse, int32_t* dwords) {
  const __m512i a = _mm512_cvtps_epi32(vmul(x[0], inverse)), b = _mm512_cvtps_epi32(vmul(x[1], inverse));
  _mm_store_si128(reinterpret_cast<__m128i*>(dwords), _mm512_cvtsepi32_epi8(a));
  _mm_store_si128(reinterpret_cast<__m128i*>(dwords + 4), _mm512_cvtsepi32_epi8(b));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}
#else
FE_INLINE int32_t to_bytes(const Vec* x, Vec inverse, int32_t* dwords) {
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    const __m256i q = _mm256_cvtps_epi32(vmul(x[i], inverse));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(dwords + 2 * i), _mm_packs_epi16(words, words));
    total = _mm256_add_epi32(total, q);
  }
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}
#endif

constexpr int kVecs = kBlockK / kLanes;

FE_INLINE void quantize_vecs(const Vec* x, int64_t row, int64_t block, const Activations& out) {
  const int64_t tile = row / kTileRows, lane = row % kTileRows, num_rows = rows_of_tile(out.num_rows, tile);
  Vec most = vabs(x[0]);
  for (int i = 1; i < kVecs; ++i) most = vmax(most, vabs(x[i]));
  const float largest = vmaximum(most);
  alignas(16) int32_t dwords[kBlockK / 4];
  const int32_t sum = to_bytes(x, vset(largest > 0.0f ? 127.0f / largest : 0.0f), dwords);
  int32_t* const values = reinterpret_cast<int32_t*>(out.values + tile * kTileRows * out.padded_k) + block * kBlockK / 4 * num_rows + lane;
  for (int i = 0; i < kBlockK / 4; ++i) values[i * num_rows] = dwords[i];
  float scale = largest * (1.0f / 127.0f);
  uint32_t bits;
  __builtin_memcpy(&bits, &scale, sizeof(bits));
  bits &= ~3u;
  __builtin_memcpy(&scale, &bits, sizeof(bits));
  const int64_t at = tile * kTileRows * (out.padded_k / kBlockK) + block * num_rows + lane;
  out.scales[at] = scale;
  out.offsets[at] = -kMagic * scale;
  out.sums[at] = scale * static_cast<float>(sum);
  out.starts[at] = kMagicBits - 128 * sum;
}

}  // namespace

void quantize_block(const float* x, int64_t row, int64_t block, const Activations& out) {
  Vec values[kVecs];
  for (int i = 0; i < kVecs; ++i) values[i] = vload(x + i * kLanes);
  quantize_vecs(values, row, block, out);
}

void quantize_row(const float* x, int64_t k, int64_t row, const Activations& out) {
  if (!out.quantized) {
    float* const target = out.rows + row * out.padded_k;
    for (int64_t i = 0; i < out.padded_k; i += kLanes) vstore(target + i, vload_n(x + i, max_i(0, min_i(kLanes, k - i))));
    return;
  }
  int64_t block = 0;
  for (; (block + 1) * kBlockK <= k; ++block) quantize_block(x + block * kBlockK, row, block, out);
  if (block * kBlockK == k) return;
  Vec values[kVecs];
  for (int i = 0; i < kVecs; ++i) values[i] = vload_n(x + block * kBlockK + i * kLanes, max_i(0, min_i(kLanes, k - block * kBlockK - i * kLanes)));
  quantize_vecs(values, row, block, out);
}

}  // namespace FE_ISA
}  // namespace fastengine
