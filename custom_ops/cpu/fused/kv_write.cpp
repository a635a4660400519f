// Keys and values into the paged cache.
#include "attention.h"

namespace fastengine {
namespace FE_ISA {
namespace {

template <typename T>
FE_INLINE T* row_base(const KvLayer& c, void* cache, int64_t slot, int64_t head) {
  return static_cast<T*>(cache) + (slot / c.block_size * c.num_kv_heads + head) * c.block_size * c.head_dim;
}

template <typename T>
void store_row(const KvLayer& c, int64_t slot, int64_t head, const float* key, const float* value) {
  const int64_t offset = slot % c.block_size;
  T* const keys = row_base<T>(c, c.key, slot, head) + offset;
  T* const values = row_base<T>(c, c.value, slot, head) + offset * c.head_dim;
  for (int64_t d = 0; d < c.head_dim; ++d) {
    from_float(key[d], keys + d * c.block_size);
    from_float(value[d], values + d);
  }
}

FE_INLINE float largest_of(const float* x, int64_t n) {
  Vec most = vzero();
  for (int64_t i = 0; i < n; i += kLanes) most = vmax(most, vmax(vload(x + i), vsub(vzero(), vload(x + i))));
  return vmaximum(most);
}

#if defined(__AVX512F__)
// Of 16 values of at most 127: four dwords of s8 plus 128, `stride` bytes apart.
FE_INLINE void scatter_quads(Vec x, uint8_t* out, int64_t stride) {
  const __m128i bytes = _mm_xor_si128(_mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)), _mm_set1_epi8(-128));
  const int32_t quads[] = {_mm_cvtsi128_si32(bytes), _mm_extract_epi32(bytes, 1), _mm_extract_epi32(bytes, 2), _mm_extract_epi32(bytes, 3)};
  for (int i = 0; i < 4; ++i) __builtin_memcpy(out + i * stride, quads + i, 4);
}

// As s8 into byte `at` of each of 16 dwords.
FE_INLINE void insert_bytes(Vec x, int8_t* out, int64_t at) {
  const __m512i shifted = _mm512_sll_epi32(_mm512_cvtps_epi32(x), _mm_cvtsi32_si128(static_cast<int>(8 * at)));
  _mm512_mask_storeu_epi8(out, 0x1111111111111111ull << at, shifted);
}
#else
FE_INLINE void scatter_quads(Vec x, uint8_t* out, int64_t stride) {
  const __m256i q = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  const __m128i bytes = _mm_xor_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(-128));
  const int32_t quads[] = {_mm_cvtsi128_si32(bytes), _mm_extract_epi32(bytes, 1)};
  for (int i = 0; i < 2; ++i) __builtin_memcpy(out + i * stride, quads + i, 4);
}

// Byte by byte: another thread may be writing the neighbours in the same dwords.
FE_INLINE void insert_bytes(Vec x, int8_t* out, int64_t at) {
  alignas(32) int32_t dwords[kLanes];
  _mm256_store_si256(reinterpret_cast<__m256i*>(dwords), _mm256_cvtps_epi32(x));
  for (int i = 0; i < kLanes; ++i) out[4 * i + at] = static_cast<int8_t>(dwords[i]);
}
#endif

FE_INLINE void store_row_int8(const KvLayer& c, int64_t slot, int64_t head, const float* key, const float* value) {
  const int64_t block = slot / c.block_size, offset = slot % c.block_size, d = c.head_dim;
  const int64_t base = (block * c.num_kv_heads + head) * c.block_size;
  uint8_t* const keys = static_cast<uint8_t*>(c.key) + base * d + offset * 4;
  int8_t* const values = static_cast<int8_t*>(c.value) + base * d + offset / 4 * 4 * d;
  const float key_most = largest_of(key, d), value_most = largest_of(value, d);
  const Vec key_inverse = vset(key_most > 0 ? 127.0f / key_most : 0.0f), value_inverse = vset(value_most > 0 ? 127.0f / value_most : 0.0f);
  for (int64_t i = 0; i < d; i += kLanes) {
    scatter_quads(vmul(vload(key + i), key_inverse), keys + i * c.block_size, c.block_size * 4);
    insert_bytes(vmul(vload(value + i), value_inverse), values + i * 4, offset % 4);
  }
  c.key_scale[base + offset] = key_most / 127.0f;
  c.value_scale[base + offset] = value_most / 127.0f;
}

}  // namespace

void write_kv(const KvLayer& cache, int64_t slot, int64_t head, const float* key, const float* value) {
  switch (cache.type) {
    case KvType::kFloat32: return store_row<float>(cache, slot, head, key, value);
    case KvType::kBfloat16: return store_row<uint16_t>(cache, slot, head, key, value);
    default: return store_row_int8(cache, slot, head, key, value);
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
