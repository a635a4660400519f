// Attention over an int8 cache, in integer dot products.
//
// Queries are quantized per row. A chunk's exponentials, each times its position's value scale, become
// u8 with one scale per row and chunk.
#include "attention.h"
#include "dot.h"

namespace fastengine {
namespace FE_ISA {
namespace {

// The 16-position pieces of one chunk.
struct Chunk {
  const uint8_t* keys[kChunk / 16];    // [dim / 4][block_size][4]
  const int8_t* values[kChunk / 16];   // [position / 4][dim][4]
  const float *key_scales[kChunk / 16], *value_scales[kChunk / 16];
};

struct Rows {
  int32_t* queries;  // [rows][head_dim / 4] of four s8
  const float* scales;
  const int32_t* starts;  // -128 times the sum of a row's query
  RowState* states;
  float* out;  // [rows][head_dim]
};

template <int kRows>
FE_INLINE void score_vectors(const uint8_t* const* keys, const float* const* key_scales, int64_t block_size, const Rows& rows, int64_t quads, float* scores) {
  IVec sums[kRows][kAtOnce];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kAtOnce; ++v) sums[r][v] = iset(rows.starts[r]);
  }
  for (int64_t i = 0; i < quads; ++i) {
    IVec key[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) key[v] = iload(keys[v] + i * block_size * 4);
    for (int r = 0; r < kRows; ++r) {
      const IVec q = iset(rows.queries[r * quads + i]);
      for (int v = 0; v < kAtOnce; ++v) add_dots(sums[r][v], key[v], q);
    }
  }
  for (int v = 0; v < kAtOnce; ++v) {
    const Vec key_scale = vload(key_scales[v]);
    for (int r = 0; r < kRows; ++r) {
      vstore(scores + r * kChunk + v * kLanes, vmul(vmul(to_floats(sums[r][v]), vset(rows.scales[r])), key_scale));
    }
  }
}

// out = out * shrink + (sum over positions of weights (u8) * values) * scale
template <int kRows, int kVecs>
FE_INLINE void add_values(const int8_t* const* values, int64_t head_dim, const int32_t* weights, int64_t quads, const float* shrink, const float* scales, float* out) {
  IVec sums[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) sums[r][v] = iset(0);
  }
  for (int64_t i = 0; i < quads; ++i) {
    const int8_t* const row = values[i / 4] + i % 4 * head_dim * 4;
    IVec value[kVecs];
    for (int v = 0; v < kVecs; ++v) value[v] = iload(row + v * kLanes * 4);
    for (int r = 0; r < kRows; ++r) {
      const IVec p = iset(weights[r * (kChunk / 4) + i]);
      for (int v = 0; v < kVecs; ++v) add_dots(sums[r][v], p, value[v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      float* const target = out + r * head_dim + v * kLanes;
      vstore(target, vfma(to_floats(sums[r][v]), vset(scales[r]), vmul(vload(target), vset(shrink[r]))));
    }
  }
}

// `count` exponentials times value scales, as u8, zeros behind them up to `padded`; returns their scale.
FE_INLINE float quantize_weights(float* p, const Chunk& chunk, int64_t count, int64_t padded, uint8_t* out) {
  Vec most = vzero();
  for (int64_t i = 0; i < padded; i += kLanes) {
    Vec product = vmul(vload(p + i), vload(chunk.value_scales[i / 16] + i % 16));
    // Scales of positions that nobody has written yet may be anything.
    if (i + kLanes > count) product = vkeep_n(product, max_i(0, count - i), vzero());
    vstore(p + i, product);
    most = vmax(most, product);
  }
  const float largest = vmaximum(most);
  const Vec inverse = vset(largest > 0.0f ? 255.0f / largest : 0.0f);
  for (int64_t i = 0; i < padded; i += kLanes) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(vmul(vload(p + i), inverse))));
#else
    const __m256i q = _mm256_cvtps_epi32(vmul(vload(p + i), inverse));
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packus_epi16(words, words));
#endif
  }
  return largest * (1.0f / 255.0f);
}

template <int kRows>
void attend_group(const Chunk& chunk, const KvLayer& c, const int64_t* counts, const Rows& rows) {
  alignas(64) float scores[kRows * kChunk];
  alignas(64) int32_t weights[kRows * kChunk / 4];
  float shrink[kRows], scales[kRows];
  int64_t most = 0;
  for (int r = 0; r < kRows; ++r) most = max_i(most, counts[r]);
  const int64_t padded = ceil_div(most, kLanes) * kLanes;
  for (int64_t i = 0; i < most; i += kAtOnce * kLanes) {
    const uint8_t* keys[kAtOnce];
    const float* key_scales[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      const int64_t position = i + v * kLanes;
      keys[v] = chunk.keys[position / 16] + position % 16 * 4;
      key_scales[v] = chunk.key_scales[position / 16] + position % 16;
    }
    score_vectors<kRows>(keys, key_scales, c.block_size, rows, c.head_dim / 4, scores + i);
  }
  for (int r = 0; r < kRows; ++r) {
    shrink[r] = softmax_chunk(scores + r * kChunk, counts[r], padded, rows.states + r);
    scales[r] = quantize_weights(scores + r * kChunk, chunk, counts[r], padded, reinterpret_cast<uint8_t*>(weights + r * (kChunk / 4)));
  }
  const int64_t quads = ceil_div(most, 4);
  const int8_t* values[kChunk / 16];
  int64_t d = 0;
  for (; d + kAtOnce * kLanes <= c.head_dim; d += kAtOnce * kLanes) {
    for (int i = 0; i < kChunk / 16; ++i) values[i] = chunk.values[i] + d * 4;
    add_values<kRows, kAtOnce>(values, c.head_dim, weights, quads, shrink, scales, rows.out + d);
  }
  for (; d < c.head_dim; d += kLanes) {
    for (int i = 0; i < kChunk / 16; ++i) values[i] = chunk.values[i] + d * 4;
    add_values<kRows, 1>(values, c.head_dim, weights, quads, shrink, scales, rows.out + d);
  }
}

void attend_rows(int64_t num_rows, const Chunk& chunk, const KvLayer& c, const int64_t* counts, const Rows& rows) {
  switch (num_rows) {
    case 1: return attend_group<1>(chunk, c, counts, rows);
    case 2: return attend_group<2>(chunk, c, counts, rows);
    case 3: return attend_group<3>(chunk, c, counts, rows);
    case 4: return attend_group<4>(chunk, c, counts, rows);
    case 5: return attend_group<5>(chunk, c, counts, rows);
    default: return attend_group<6>(chunk, c, counts, rows);
  }
}

// s8 values of a query row; returns the sum.
FE_INLINE int32_t quantize_query(const float* x, int64_t d, float* scale, int8_t* out) {
  Vec most = vzero();
  for (int64_t i = 0; i < d; i += kLanes) most = vmax(most, vmax(vload(x + i), vsub(vzero(), vload(x + i))));
  const float largest = vmaximum(most);
  const Vec inverse = vset(largest > 0 ? 127.0f / largest : 0.0f);
  Vec total = vzero();
  for (int64_t i = 0; i < d; i += kLanes) {
    const Vec q = vround(vmul(vload(x + i), inverse));
    total = vadd(total, q);
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(q)));
#else
    const __m256i ints = _mm256_cvtps_epi32(q);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packs_epi16(words, words));
#endif
  }
  *scale = largest / 127.0f;
  return static_cast<int32_t>(vsum(total));
}

Chunk chunk_at(const AttentionInput& in, const AttentionTask& task, const int32_t* table, int64_t begin, int64_t end) {
  const KvLayer& c = in.cache;
  Chunk chunk;
  for (int64_t i = 0; i < kChunk / 16; ++i) {
    // Pieces behind the end repeat the last one: they are read, but count for nothing.
    const int64_t position = min_i(begin + 16 * i, (end - 1) / 16 * 16), offset = position % c.block_size;
    const int64_t base = (table[position / c.block_size] * c.num_kv_heads + task.kv_head) * c.block_size;
    chunk.keys[i] = static_cast<const uint8_t*>(c.key) + base * c.head_dim + offset * 4;
    chunk.values[i] = static_cast<const int8_t*>(c.value) + (base + offset) * c.head_dim;
    chunk.key_scales[i] = c.key_scale + base + offset;
    chunk.value_scales[i] = c.value_scale + base + offset;
  }
  return chunk;
}

}  // namespace

void attention_int8(const AttentionInput& in, const AttentionTask& task, void* scratch) {
  const KvLayer& c = in.cache;
  const int64_t d = c.head_dim, heads = in.num_heads / c.num_kv_heads, num_rows = task.num_queries * heads;
  float* const out = static_cast<float*>(scratch);
  int32_t* const queries = reinterpret_cast<int32_t*>(out + kTaskRows * d);
  RowState states[kTaskRows];
  float scales[kTaskRows];
  int32_t starts[kTaskRows];
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* const source = in.qkv + (task.first_token + r / heads) * in.qkv_stride + (task.kv_head * heads + r % heads) * d;
    starts[r] = -128 * quantize_query(source, d, scales + r, reinterpret_cast<int8_t*>(queries + r * (d / 4)));
    scales[r] *= in.scale;
    for (int64_t i = 0; i < d; i += kLanes) vstore(out + r * d + i, vzero());
    states[r] = {-3.0e38f, 0.0f};
  }
  const int32_t* const table = in.block_tables + task.seq * in.max_blocks;
  const int64_t end = task.first_position + task.num_queries;
  for (int64_t begin = 0; begin < end; begin += kChunk) {
    const Chunk chunk = chunk_at(in, task, table, begin, end);
    for (int64_t first = 0; first < num_rows; first += kGroupRows) {
      const int64_t n = min_i(kGroupRows, num_rows - first);
      int64_t counts[kGroupRows];
      int64_t visible = 0;
      for (int64_t r = 0; r < n; ++r) {
        counts[r] = max_i(0, min_i(kChunk, task.first_position + (first + r) / heads + 1 - begin));
        visible = max_i(visible, counts[r]);
      }
      if (visible > 0) attend_rows(n, chunk, c, counts, {queries + first * (d / 4), scales + first, starts + first, states + first, out + first * d});
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float* const target = in.out + (task.first_token + r / heads) * in.num_heads * d + (task.kv_head * heads + r % heads) * d;
    const Vec inverse = vset(1.0f / states[r].sum);
    for (int64_t i = 0; i < d; i += kLanes) vstore(target + i, vmul(vload(out + r * d + i), inverse));
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
