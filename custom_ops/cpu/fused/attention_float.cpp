// Attention over a float32 or bfloat16 cache.
#include "attention.h"

namespace fastengine {
namespace FE_ISA {
namespace {

template <typename T>
FE_INLINE const T* block_base(const KvLayer& c, const void* cache, int64_t block, int64_t head) {
  return static_cast<const T*>(cache) + (block * c.num_kv_heads + head) * c.block_size * c.head_dim;
}

// scores[row][kChunk] of kAtOnce vectors of positions, whose features are `stride` apart.
template <int kRows, typename T>
FE_INLINE void score_vectors(const T* const* keys, int64_t stride, const float* queries, int64_t head_dim, float* scores) {
  Vec sums[kRows][kAtOnce];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kAtOnce; ++v) sums[r][v] = vzero();
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    Vec key[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) key[v] = load_as_float(keys[v] + d * stride);
    for (int r = 0; r < kRows; ++r) {
      const Vec q = vset(queries[r * head_dim + d]);
      for (int v = 0; v < kAtOnce; ++v) sums[r][v] = vfma(q, key[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kAtOnce; ++v) vstore(scores + r * kChunk + v * kLanes, sums[r][v]);
  }
}

// out[row][features] = out * shrink + sum over positions of p * value, for kVecs vectors of features.
template <int kRows, int kVecs, typename T>
FE_INLINE void add_values(const T* const* values, int64_t head_dim, const float* p, int64_t count, const float* shrink, float* out) {
  Vec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sums[r][v] = vmul(vload(out + r * head_dim + v * kLanes), vset(shrink[r]));
  }
  for (int64_t i = 0; i < count; ++i) {
    const T* const row = values[i / 16] + i % 16 * head_dim;
    Vec value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = load_as_float(row + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = vset(p[r * kChunk + i]);
      for (int v = 0; v < kVecs; ++v) sums[r][v] = vfma(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) vstore(out + r * head_dim + v * kLanes, sums[r][v]);
  }
}

// The 16-position pieces of one chunk.
template <typename T>
struct ChunkView {
  const T *keys[kChunk / 16], *values[kChunk / 16];
};

template <int kRows, typename T>
void attend_group(const ChunkView<T>& chunk, const KvLayer& c, const float* queries, const int64_t* counts, RowState* states, float* out) {
  alignas(64) float scores[kRows * kChunk];
  float shrink[kRows];
  int64_t most = 0;
  for (int r = 0; r < kRows; ++r) most = max_i(most, counts[r]);
  const int64_t padded = ceil_div(most, kLanes) * kLanes;
  for (int64_t i = 0; i < most; i += kAtOnce * kLanes) {
    const T* keys[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      const int64_t position = i + v * kLanes;
      keys[v] = chunk.keys[position / 16] + position % 16;
    }
    score_vectors<kRows>(keys, c.block_size, queries, c.head_dim, scores + i);
  }
  for (int r = 0; r < kRows; ++r) shrink[r] = softmax_chunk(scores + r * kChunk, counts[r], padded, states + r);
  int64_t d = 0;
  const T* values[kChunk / 16];
  const auto shifted = [&](int64_t offset) {
    for (int i = 0; i < kChunk / 16; ++i) values[i] = chunk.values[i] + offset;
  };
  for (; d + kAtOnce * kLanes <= c.head_dim; d += kAtOnce * kLanes) {
    shifted(d);
    add_values<kRows, kAtOnce>(values, c.head_dim, scores, most, shrink, out + d);
  }
  for (; d < c.head_dim; d += kLanes) {
    shifted(d);
    add_values<kRows, 1>(values, c.head_dim, scores, most, shrink, out + d);
  }
}

template <typename T>
void attend_rows(int64_t rows, const ChunkView<T>& chunk, const KvLayer& c, const float* queries, const int64_t* counts, RowState* states, float* out) {
  switch (rows) {
    case 1: return attend_group<1>(chunk, c, queries, counts, states, out);
    case 2: return attend_group<2>(chunk, c, queries, counts, states, out);
    case 3: return attend_group<3>(chunk, c, queries, counts, states, out);
    case 4: return attend_group<4>(chunk, c, queries, counts, states, out);
    case 5: return attend_group<5>(chunk, c, queries, counts, states, out);
    default: return attend_group<6>(chunk, c, queries, counts, states, out);
  }
}

template <typename T>
void attend(const AttentionInput& in, const AttentionTask& task, float* scratch) {
  const KvLayer& c = in.cache;
  const int64_t d = c.head_dim, heads = in.num_heads / c.num_kv_heads, rows = task.num_queries * heads;
  float *const queries = scratch, *const out = scratch + kTaskRows * d;
  RowState states[kTaskRows];
  for (int64_t r = 0; r < rows; ++r) {
    const float* const source = in.qkv + (task.first_token + r / heads) * in.qkv_stride + (task.kv_head * heads + r % heads) * d;
    for (int64_t i = 0; i < d; i += kLanes) vstore(queries + r * d + i, vmul(vload(source + i), vset(in.scale)));
    for (int64_t i = 0; i < d; i += kLanes) vstore(out + r * d + i, vzero());
    states[r] = {-3.0e38f, 0.0f};
  }
  const int32_t* const table = in.block_tables + task.seq * in.max_blocks;
  const int64_t end = task.first_position + task.num_queries;
  for (int64_t begin = 0; begin < end; begin += kChunk) {
    ChunkView<T> chunk;
    for (int64_t i = 0; i < kChunk / 16; ++i) {
      // Pieces behind the end repeat the last one: they are read, but count for nothing.
      const int64_t position = min_i(begin + 16 * i, (end - 1) / 16 * 16), block = table[position / c.block_size], offset = position % c.block_size;
      chunk.keys[i] = block_base<T>(c, c.key, block, task.kv_head) + offset;
      chunk.values[i] = block_base<T>(c, c.value, block, task.kv_head) + offset * d;
    }
    for (int64_t first = 0; first < rows; first += kGroupRows) {
      const int64_t n = min_i(kGroupRows, rows - first);
      int64_t counts[kGroupRows];
      int64_t visible = 0;
      for (int64_t r = 0; r < n; ++r) {
        counts[r] = max_i(0, min_i(kChunk, task.first_position + (first + r) / heads + 1 - begin));
        visible = max_i(visible, counts[r]);
      }
      if (visible > 0) attend_rows<T>(n, chunk, c, queries + first * d, counts, states + first, out + first * d);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* const target = in.out + (task.first_token + r / heads) * in.num_heads * d + (task.kv_head * heads + r % heads) * d;
    const Vec inverse = vset(1.0f / states[r].sum);
    for (int64_t i = 0; i < d; i += kLanes) vstore(target + i, vmul(vload(out + r * d + i), inverse));
  }
}

template <typename T>
void store_row(const KvLayer& c, int64_t slot, int64_t head, const float* key, const float* value) {
  const int64_t block = slot / c.block_size, offset = slot % c.block_size;
  T* const keys = const_cast<T*>(block_base<T>(c, c.key, block, head)) + offset;
  T* const values = const_cast<T*>(block_base<T>(c, c.value, block, head)) + offset * c.head_dim;
  for (int64_t d = 0; d < c.head_dim; ++d) {
    from_float(key[d], keys + d * c.block_size);
    from_float(value[d], values + d);
  }
}

// kLanes values of at most 127.
FE_INLINE void round_to_bytes(Vec x, int8_t* out) {
#if defined(__AVX512F__)
  _mm_store_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
#else
  const __m256i q = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
#endif
}

FE_INLINE void store_row_int8(const KvLayer& c, int64_t slot, int64_t head, const float* key, const float* value) {
  const int64_t block = slot / c.block_size, offset = slot % c.block_size, d = c.head_dim;
  const int64_t base = (block * c.num_kv_heads + head) * c.block_size;
  uint8_t* const keys = static_cast<uint8_t*>(c.key) + base * d + offset * 4;
  int8_t* const values = static_cast<int8_t*>(c.value) + base * d + offset / 4 * 4 * d + offset % 4;
  Vec most[2] = {vzero(), vzero()};
  for (int64_t i = 0; i < d; i += kLanes) {
    most[0] = vmax(most[0], vmax(vload(key + i), vsub(vzero(), vload(key + i))));
    most[1] = vmax(most[1], vmax(vload(value + i), vsub(vzero(), vload(value + i))));
  }
  const float key_most = vmaximum(most[0]), value_most = vmaximum(most[1]);
  const Vec key_inverse = vset(key_most > 0 ? 127.0f / key_most : 0.0f), value_inverse = vset(value_most > 0 ? 127.0f / value_most : 0.0f);
  for (int64_t i = 0; i < d; i += kLanes) {
    alignas(64) int8_t key_bytes[kLanes], value_bytes[kLanes];
    round_to_bytes(vmul(vload(key + i), key_inverse), key_bytes);
    round_to_bytes(vmul(vload(value + i), value_inverse), value_bytes);
    for (int64_t j = 0; j < kLanes; j += 4) {
      uint32_t quad;
      __builtin_memcpy(&quad, key_bytes + j, 4);
      quad ^= 0x80808080u;  // plus 128
      __builtin_memcpy(keys + (i + j) / 4 * c.block_size * 4, &quad, 4);
    }
    for (int64_t j = 0; j < kLanes; ++j) values[(i + j) * 4] = value_bytes[j];
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

int64_t attention_scratch_bytes(int64_t head_dim) { return 2 * kTaskRows * head_dim * 4; }

void attention_float(const AttentionInput& in, const AttentionTask& task, void* scratch) {
  if (in.cache.type == KvType::kBfloat16) {
    attend<uint16_t>(in, task, static_cast<float*>(scratch));
  } else {
    attend<float>(in, task, static_cast<float*>(scratch));
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
