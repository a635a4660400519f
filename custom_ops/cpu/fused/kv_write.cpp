// Keys and values into the paged cache.
#include "attention.h"
#include "dot.h"

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

constexpr int64_t kMostTogether = 128;  // features of keys that are written together

#if defined(__AVX512F__)
FE_INLINE IVec as_bytes(Vec x) { return _mm512_and_si512(_mm512_cvtps_epi32(x), _mm512_set1_epi32(255)); }
// Four vectors of values of at most 127 as the s8 of dwords, the first lowest.
FE_INLINE IVec in_quads(const Vec (&x)[4]) {
  const IVec low = _mm512_or_si512(as_bytes(x[0]), _mm512_slli_epi32(as_bytes(x[1]), 8));
  return _mm512_or_si512(low, _mm512_or_si512(_mm512_slli_epi32(as_bytes(x[2]), 16), _mm512_slli_epi32(_mm512_cvtps_epi32(x[3]), 24)));
}

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
FE_INLINE IVec as_bytes(Vec x) { return _mm256_and_si256(_mm256_cvtps_epi32(x), _mm256_set1_epi32(255)); }
FE_INLINE IVec in_quads(const Vec (&x)[4]) {
  const IVec low = _mm256_or_si256(as_bytes(x[0]), _mm256_slli_epi32(as_bytes(x[1]), 8));
  return _mm256_or_si256(low, _mm256_or_si256(_mm256_slli_epi32(as_bytes(x[2]), 16), _mm256_slli_epi32(_mm256_cvtps_epi32(x[3]), 24)));
}

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

// A slot of one head.
struct Place {
  int64_t row;  // of scales, and of values of float caches
  int64_t base, offset;  // of its block, in rows, and in it
};

FE_INLINE Place place_of(const KvLayer& c, int64_t slot, int64_t head) {
  const int64_t base = (slot / c.block_size * c.num_kv_heads + head) * c.block_size, offset = slot % c.block_size;
  return {base + offset, base, offset};
}
FE_INLINE uint8_t* keys_at(const KvLayer& c, const Place& at) { return static_cast<uint8_t*>(c.key) + at.base * c.head_dim + at.offset * 4; }
FE_INLINE int8_t* values_at(const KvLayer& c, const Place& at) { return static_cast<int8_t*>(c.value) + (at.base + at.offset / 4 * 4) * c.head_dim; }

// Sets a row's scale and returns what its values are multiplied by.
FE_INLINE Vec begin_row(const float* row, int64_t d, float* scale) {
  const float most = largest_of(row, d);
  *scale = most / 127.0f;
  return vset(most > 0 ? 127.0f / most : 0.0f);
}

FE_INLINE void store_key_int8(const KvLayer& c, int64_t slot, int64_t head, const float* key) {
  const Place at = place_of(c, slot, head);
  const Vec inverse = begin_row(key, c.head_dim, c.key_scale + at.row);
  for (int64_t i = 0; i < c.head_dim; i += kLanes) scatter_quads(vmul(vload(key + i), inverse), keys_at(c, at) + i * c.block_size, c.block_size * 4);
}

FE_INLINE void store_value_int8(const KvLayer& c, int64_t slot, int64_t head, const float* value) {
  const Place at = place_of(c, slot, head);
  const Vec inverse = begin_row(value, c.head_dim, c.value_scale + at.row);
  for (int64_t i = 0; i < c.head_dim; i += kLanes) insert_bytes(vmul(vload(value + i), inverse), values_at(c, at) + i * 4, at.offset % 4);
}

// Whether `n` slots follow each other in one block, the first at a multiple of n.
FE_INLINE bool are_together(const KvLayer& c, const int32_t* slots, int64_t n) {
  if (slots[0] < 0 || slots[0] % c.block_size % n != 0) return false;
  for (int64_t i = 1; i < n; ++i) {
    if (slots[i] != slots[0] + i) return false;
  }
  return true;
}

constexpr int64_t kPiece = 16;  // positions whose keys are written together; a block holds whole pieces

#if defined(__AVX512F__)
void store_keys_int8(const KvLayer& c, int64_t slot, int64_t head, const float* rows) {
  const int64_t d = c.head_dim;
  const Place at = place_of(c, slot, head);
  alignas(64) uint8_t bytes[kPiece * kMostTogether];
  for (int64_t r = 0; r < kPiece; ++r) {
    const Vec inverse = begin_row(rows + r * d, d, c.key_scale + at.row + r);
    for (int64_t i = 0; i < d; i += kLanes) {
      const __m128i q = _mm_xor_si128(_mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(vmul(vload(rows + r * d + i), inverse))), _mm_set1_epi8(-128));
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes + r * d + i), q);
    }
  }
  const __m512i order = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(static_cast<int>(d)));
  for (int64_t i = 0; i < d; i += 4) _mm512_storeu_si512(keys_at(c, at) + i * c.block_size, _mm512_i32gather_epi32(order, bytes + i, 1));
}
#endif

// Four positions' values share dwords.
FE_INLINE void store_values_int8(const KvLayer& c, int64_t slot, int64_t head, const float* rows) {
  const int64_t d = c.head_dim;
  const Place at = place_of(c, slot, head);
  Vec inverses[4];
  for (int64_t r = 0; r < 4; ++r) inverses[r] = begin_row(rows + r * d, d, c.value_scale + at.row + r);
  for (int64_t i = 0; i < d; i += kLanes) {
    Vec scaled[4];
    for (int64_t r = 0; r < 4; ++r) scaled[r] = vmul(vload(rows + r * d + i), inverses[r]);
    istore(values_at(c, at) + i * 4, in_quads(scaled));
  }
}

}  // namespace

void write_keys(const KvLayer& cache, const int32_t* slots, int64_t num_rows, int64_t head, const float* rows) {
  for (int64_t r = 0; r < num_rows;) {
#if defined(__AVX512F__)
    if (num_rows - r >= kPiece && cache.head_dim <= kMostTogether && are_together(cache, slots + r, kPiece)) {
      store_keys_int8(cache, slots[r], head, rows + r * cache.head_dim);
      r += kPiece;
      continue;
    }
#endif
    if (slots[r] >= 0) store_key_int8(cache, slots[r], head, rows + r * cache.head_dim);
    ++r;
  }
}

void write_values(const KvLayer& cache, const int32_t* slots, int64_t num_rows, int64_t head, const float* rows) {
  for (int64_t r = 0; r < num_rows;) {
    if (num_rows - r >= 4 && are_together(cache, slots + r, 4)) {
      store_values_int8(cache, slots[r], head, rows + r * cache.head_dim);
      r += 4;
      continue;
    }
    if (slots[r] >= 0) store_value_int8(cache, slots[r], head, rows + r * cache.head_dim);
    ++r;
  }
}

void expect_kv(const KvLayer& cache, int64_t slot, int64_t head) {
  if (cache.type != KvType::kInt8) return;
  const auto ask = [](const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); };
  const Place at = place_of(cache, slot, head);
  for (int64_t i = 0; i < cache.head_dim; i += 4) ask(keys_at(cache, at) + i * cache.block_size);
  for (int64_t i = 0; i < 4 * cache.head_dim; i += 64) ask(values_at(cache, at) + i);
  ask(cache.key_scale + at.row);
  ask(cache.value_scale + at.row);
}

void write_kv(const KvLayer& cache, int64_t slot, int64_t head, const float* key, const float* value) {
  switch (cache.type) {
    case KvType::kFloat32: return store_row<float>(cache, slot, head, key, value);
    case KvType::kBfloat16: return store_row<uint16_t>(cache, slot, head, key, value);
    default: store_key_int8(cache, slot, head, key), store_value_int8(cache, slot, head, value);
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
