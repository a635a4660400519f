// Paged attention of several queries of a sequence: tiles of query rows against tiles of keys.
//
//   rows of a task: (query 0, head 0) (query 0, head 1) ... (query 1, head 0) ...   all of one KV head
//   keys of a tile: 64 positions, transposed once and used by every row
//
// Method: FlashAttention-2 (Dao, 2023), on vectors instead of tensor cores.
#include "attention.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int64_t kKeys = 64;  // positions per tile
constexpr int64_t kRows = 96;  // query rows per task, about

// C[kHeight][kVecs] = (or +=) A[kHeight][depth] * B[depth][kVecs vectors]
template <int kHeight, int kVecs>
FE_INLINE void multiply_block(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth, bool accumulate) {
  Vec sums[kHeight][kVecs];
  for (int i = 0; i < kHeight; ++i) {
    for (int v = 0; v < kVecs; ++v) sums[i][v] = accumulate ? vload(c + i * ldc + v * kLanes) : vzero();
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[kVecs];
    for (int v = 0; v < kVecs; ++v) right[v] = vload(b + k * ldb + v * kLanes);
    for (int i = 0; i < kHeight; ++i) {
      const Vec left = vset(a[i * lda + k]);
      for (int v = 0; v < kVecs; ++v) sums[i][v] = vfma(left, right[v], sums[i][v]);
    }
  }
  for (int i = 0; i < kHeight; ++i) {
    for (int v = 0; v < kVecs; ++v) vstore(c + i * ldc + v * kLanes, sums[i][v]);
  }
}

template <int kVecs>
void multiply_columns(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t depth, bool accumulate) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6) multiply_block<6, kVecs>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, accumulate);
  for (; i + 2 <= rows; i += 2) multiply_block<2, kVecs>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, accumulate);
  for (; i < rows; ++i) multiply_block<1, kVecs>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, depth, accumulate);
}

// C = (or +=) A * B for `columns` columns, a multiple of 16.
void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows, int64_t columns, int64_t depth, bool accumulate) {
  constexpr int kVecs = kLanes == 16 ? 4 : 2;
  int64_t j = 0;
  for (; j + kVecs * kLanes <= columns; j += kVecs * kLanes) multiply_columns<kVecs>(a, lda, b + j, ldb, c + j, ldc, rows, depth, accumulate);
  for (; j < columns; j += kLanes) multiply_columns<1>(a, lda, b + j, ldb, c + j, ldc, rows, depth, accumulate);
}

FE_INLINE __m128 load4(const float* p) { return _mm_loadu_ps(p); }
FE_INLINE __m128 load4(const uint16_t* p) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(raw), 16));
}

// transposed[d][i] = key of position begin + i; columns past `count` are zero.
template <typename Cache>
void load_keys(const KvView<Cache>& kv, int64_t begin, int64_t count, float* transposed) {
  const int64_t size = kv.head_size;
  if (count < kKeys) {
    for (int64_t j = 0; j < size * kKeys; j += kLanes) vstore(transposed + j, vzero());
  }
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const Cache* row[4];
    for (int64_t u = 0; u < 4; ++u) row[u] = kv.key(begin + i + u);
    int64_t d = 0;
    for (; d + 4 <= size; d += 4) {
      __m128 r0 = load4(row[0] + d), r1 = load4(row[1] + d), r2 = load4(row[2] + d), r3 = load4(row[3] + d);
      _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
      _mm_storeu_ps(transposed + d * kKeys + i, r0);
      _mm_storeu_ps(transposed + (d + 1) * kKeys + i, r1);
      _mm_storeu_ps(transposed + (d + 2) * kKeys + i, r2);
      _mm_storeu_ps(transposed + (d + 3) * kKeys + i, r3);
    }
    for (; d < size; ++d) {
      for (int64_t u = 0; u < 4; ++u) transposed[d * kKeys + i + u] = to_float(row[u][d]);
    }
  }
  for (; i < count; ++i) {
    const Cache* const row = kv.key(begin + i);
    for (int64_t d = 0; d < size; ++d) transposed[d * kKeys + i] = to_float(row[d]);
  }
}

// values[i][0:padded]: the value of position begin + i, zeros after it.
template <typename Cache>
void load_values(const KvView<Cache>& kv, int64_t begin, int64_t count, int64_t padded, float* values) {
  for (int64_t i = 0; i < count; ++i) {
    const Cache* const row = kv.value(begin + i);
    int64_t j = 0;
    for (; j + kLanes <= kv.value_size; j += kLanes) vstore(values + i * padded + j, load_as_float(row + j));
    for (; j < padded; j += kLanes) vstore(values + i * padded + j, load_as_float_n(row + j, max_i(0, min_i(kLanes, kv.value_size - j))));
  }
}

int64_t pad16(int64_t n) { return ceil_div(n, 16) * 16; }

struct Tile {
  int64_t first_query, num_queries, heads, rows;  // queries within the sequence
  int64_t position;                               // of the first query
  int64_t padded_value;
  float *query, *keys, *values, *scores, *out, *maximum, *sum;
};

Tile make_tile(const AttentionArgs& a, int64_t seq, int64_t index) {
  Tile tile;
  const int64_t length = a.query_starts[seq + 1] - a.query_starts[seq];
  tile.heads = a.num_heads / a.num_kv_heads;
  const int64_t per_tile = max_i(1, kRows / tile.heads);
  tile.first_query = index * per_tile;
  tile.num_queries = min_i(per_tile, length - tile.first_query);
  tile.rows = tile.num_queries * tile.heads;
  tile.position = a.context_lens[seq] - length + tile.first_query;
  tile.padded_value = pad16(a.value_size);
  const int64_t sizes[] = {pad16(tile.rows * a.head_size), a.head_size * kKeys,  kKeys * tile.padded_value,
                           tile.rows * kKeys,              tile.rows * tile.padded_value, pad16(tile.rows),  pad16(tile.rows)};
  float** const parts[] = {&tile.query, &tile.keys, &tile.values, &tile.scores, &tile.out, &tile.maximum, &tile.sum};
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  float* at = static_cast<float*>(thread_scratch(total * static_cast<int64_t>(sizeof(float))));
  for (int i = 0; i < 7; ++i) {
    *parts[i] = at;
    at += sizes[i];
  }
  return tile;
}

void start_rows(const AttentionArgs& a, int64_t seq, int64_t kv_head, const Tile& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t token = a.query_starts[seq] + tile.first_query + r / tile.heads;
    const float* const query = a.query + (token * a.num_heads + kv_head * tile.heads + r % tile.heads) * a.head_size;
    for (int64_t j = 0; j < a.head_size; j += kLanes) {
      const int64_t lanes = min_i(kLanes, a.head_size - j);
      vstore_n(tile.query + r * a.head_size + j, vmul(vload_n(query + j, lanes), vset(a.scale)), lanes);
    }
    tile.maximum[r] = kNoScore;
    tile.sum[r] = 0.0f;
  }
  for (int64_t j = 0; j < tile.rows * tile.padded_value; j += kLanes) vstore(tile.out + j, vzero());
}

void softmax_rows(const AttentionArgs& a, const Tile& tile, int64_t begin, int64_t count) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    float* const scores = tile.scores + r * kKeys;
    const int64_t position = tile.position + r / tile.heads;
    const int64_t first = max_i(0, first_visible(a, position) - begin), last = min_i(count, position + 1 - begin);
    if (first >= last) {
      for (int64_t i = 0; i < kKeys; i += kLanes) vstore(scores + i, vzero());
      continue;
    }
    const float rescale = softmax_step(scores, first, last, kKeys, tile.maximum + r, tile.sum + r);
    if (rescale == 1.0f) continue;
    float* const out = tile.out + r * tile.padded_value;
    for (int64_t j = 0; j < tile.padded_value; j += kLanes) vstore(out + j, vmul(vload(out + j), vset(rescale)));
  }
}

void finish_rows(const AttentionArgs& a, int64_t seq, int64_t kv_head, const Tile& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t token = a.query_starts[seq] + tile.first_query + r / tile.heads;
    float* const out = a.out + (token * a.num_heads + kv_head * tile.heads + r % tile.heads) * a.value_size;
    const Vec inverse = vset(1.0f / tile.sum[r]);
    for (int64_t j = 0; j < a.value_size; j += kLanes) {
      vstore_n(out + j, vmul(vload(tile.out + r * tile.padded_value + j), inverse), min_i(kLanes, a.value_size - j));
    }
  }
}

template <typename Cache>
void attend_tile(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t index) {
  const Tile tile = make_tile(a, seq, index);
  const KvView<Cache> kv = kv_view<Cache>(a, seq, kv_head);
  start_rows(a, seq, kv_head, tile);
  const int64_t end = tile.position + tile.num_queries;
  for (int64_t begin = first_visible(a, tile.position); begin < end; begin += kKeys) {
    const int64_t count = min_i(kKeys, end - begin);
    load_keys(kv, begin, count, tile.keys);
    load_values(kv, begin, count, tile.padded_value, tile.values);
    multiply(tile.query, a.head_size, tile.keys, kKeys, tile.scores, kKeys, tile.rows, kKeys, a.head_size, false);
    softmax_rows(a, tile, begin, count);
    multiply(tile.scores, kKeys, tile.values, tile.padded_value, tile.out, tile.padded_value, tile.rows, tile.padded_value, count, true);
  }
  finish_rows(a, seq, kv_head, tile);
}

}  // namespace

int64_t prefill_tiles(const AttentionArgs& args, int64_t seq) {
  const int64_t length = args.query_starts[seq + 1] - args.query_starts[seq];
  return ceil_div(length, max_i(1, kRows / (args.num_heads / args.num_kv_heads)));
}

void prefill_task(const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t tile) {
  if (args.cache_is_bf16) {
    attend_tile<uint16_t>(args, seq, kv_head, tile);
  } else {
    attend_tile<float>(args, seq, kv_head, tile);
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
