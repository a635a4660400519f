// Attention over an int8 cache, in integer dot products.
//
// Queries are quantized per row. A position's value scale goes into its score (as a power of two), so that
// a chunk's largest product of weight and value scale is known before the exponentials, which become u8 at
// once; the sum takes it out again.
#include "attention_dots.h"
#include "attention_walk.h"

namespace fastengine {
namespace FE_ISA {
namespace {

// Of 254.4: two of the rounded sums that a weight is the difference of are then never more than 255 apart.
constexpr float kLog2OfLargest = 7.9909553f;
constexpr float kLeastScale = 1.0e-30f;  // of a value row of zeros
constexpr int64_t kLargestSum = 1 << 22;  // a sum of products as far from zero as this is exact beside kMagic

// Of vectors of a piece side by side, every second of eight lanes lies in the line of the one before it.
FE_INLINE constexpr bool begins_line(int v) { return v * kLanes % 16 == 0; }

// Into the second level: the first is small beside a chunk of a long context that others push out again.
FE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#if defined(__AVX512F__)
FE_INLINE Vec bits_as_floats(IVec x) { return _mm512_castsi512_ps(x); }
FE_INLINE IVec to_ints(Vec x) { return _mm512_cvtps_epi32(x); }
FE_INLINE IVec iadd(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
FE_INLINE IVec isub(IVec a, IVec b) { return _mm512_sub_epi32(a, b); }
FE_INLINE Vec vabs(Vec x) { return _mm512_abs_ps(x); }
FE_INLINE void store_bytes(IVec x, int8_t* out) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(x)); }

// For each of up to 8 rows its 16 lanes, put together by `op`, in the lane of its number; in the same order whatever the row.
template <int kRows, typename Op>
FE_INLINE Vec across(const Vec* x, const Op& op) {
  const auto row = [&](int i) { return x[i < kRows ? i : kRows - 1]; };
  const auto pair = [&](Vec a, Vec b) { return _mm512_castps_pd(op(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))); };
  const auto four = [&](__m512d a, __m512d b) { return op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b))); };
  const Vec low = four(pair(row(0), row(1)), pair(row(2), row(3))), high = kRows <= 4 ? low : four(pair(row(4), row(5)), pair(row(6), row(7)));
  const Vec both = op(_mm512_shuffle_f32x4(low, high, 0x44), _mm512_shuffle_f32x4(low, high, 0xee));
  return op(_mm512_shuffle_f32x4(both, both, 0x88), _mm512_shuffle_f32x4(both, both, 0xdd));
}
#else
FE_INLINE Vec bits_as_floats(IVec x) { return _mm256_castsi256_ps(x); }
FE_INLINE IVec to_ints(Vec x) { return _mm256_cvtps_epi32(x); }
FE_INLINE IVec iadd(IVec a, IVec b) { return _mm256_add_epi32(a, b); }
FE_INLINE IVec isub(IVec a, IVec b) { return _mm256_sub_epi32(a, b); }
FE_INLINE Vec vabs(Vec x) { return vmax(x, vsub(vzero(), x)); }
FE_INLINE void store_bytes(IVec x, int8_t* out) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(words, words));
}

// For each of up to 8 rows its 8 lanes, put together by `op`, in the lane of its number; in the same order whatever the row.
template <int kRows, typename Op>
FE_INLINE Vec across(const Vec* x, const Op& op) {
  const auto row = [&](int i) { return x[i < kRows ? i : kRows - 1]; };
  const auto pair = [&](Vec a, Vec b) { return _mm256_castps_pd(op(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b))); };
  const auto four = [&](__m256d a, __m256d b) { return op(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b))); };
  const Vec low = four(pair(row(0), row(1)), pair(row(2), row(3))), high = kRows <= 4 ? low : four(pair(row(4), row(5)), pair(row(6), row(7)));
  return op(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}
#endif

template <int kRows>
FE_INLINE void quantize_rows(const float* rows, int64_t d, float score_scale, int8_t* values, float* scales, int32_t* starts) {
  // 127, or less where a sum of so many products could become too large.
  const float levels = static_cast<float>(min_i(127, (kLargestSum - 1) / (127 * d)));
  Vec most[kRows], totals[kRows];
  for (int r = 0; r < kRows; ++r) {
    most[r] = vzero();
    for (int64_t i = 0; i < d; i += kLanes) most[r] = vmax(most[r], vabs(vload(rows + r * d + i)));
  }
  const Vec largest = across<kRows>(most, vmax), scale = vdiv(largest, vset(levels));
  alignas(64) float inverses[kLanes];
  vstore(inverses, vmin(vdiv(vset(levels), largest), vset(3.0e38f)));
  for (int r = 0; r < kRows; ++r) {
    IVec total = iset(0);
    for (int64_t i = 0; i < d; i += kLanes) {
      const IVec q = to_ints(vmul(vload(rows + r * d + i), vset(inverses[r])));
      total = iadd(total, q);
      store_bytes(q, values + r * d + i);
    }
    totals[r] = to_floats(total);
  }
  vstore_n(scales, vmul(scale, vset(score_scale)), kRows);
  istore_n(starts, iadd(to_ints(vmul(across<kRows>(totals, vadd), vset(-128.0f))), iset(kMagicBits)), kRows);
}

struct Int8Kernel {
  static constexpr int64_t kLeast = 2 * kLanes;  // positions are computed in multiples of this

  struct Chunk {
    const uint8_t* keys[kChunk / 16];   // [dim / 4][block_size][4]
    const int8_t* values[kChunk / 16];  // [position / 4][dim][4]
    const float *key_scales[kChunk / 16], *value_scales[kChunk / 16];
  };

  int64_t block_size, d;
  // Of the task's rows, scales and starts as FinishedQueries has them.
  Query* queries;
  alignas(64) float scales[kTaskRows];
  alignas(64) int32_t starts[kTaskRows];
  // Of the chunk in hand; positions that nobody has written weigh nothing.
  alignas(64) float key_scales[kChunk], key_offsets[kChunk], value_logs[kChunk], value_inverses[kChunk];

  FE_MEMBER Int8Kernel(const AttentionInput& in, void* scratch) : block_size(in.cache.block_size), d(in.cache.head_dim), queries(static_cast<Query*>(scratch)) {}

  FE_MEMBER bool take_finished(const AttentionInput& in, const AttentionTask& task) {
    const FinishedQueries& f = in.finished;
    if (f.values == nullptr) return false;
    const int64_t heads = in.num_heads / in.cache.num_kv_heads;
    for (int64_t h = 0; h < heads; ++h) {
      int64_t from = (task.kv_head * heads + h) * f.num_rows + task.first_row;
      for (int64_t row = h; row < task.num_queries * heads; row += heads, ++from) {
        put_queries(f.values + from * d, d, queries + row * d);
        scales[row] = f.scales[from];
        starts[row] = f.starts[from];
      }
    }
    return true;
  }

  FE_MEMBER void take(const AttentionInput& in, const float* rows, int64_t num_rows) {
#if defined(FE_HAS_DOTS)
    quantize_queries(rows, num_rows, d, in.scale, queries, scales, starts);
#else
    int8_t* const bytes = reinterpret_cast<int8_t*>(queries + kTaskRows * d);
    quantize_queries(rows, num_rows, d, in.scale, bytes, scales, starts);
    put_queries(bytes, num_rows * d, queries);
#endif
  }

  FE_MEMBER void place(const AttentionInput& in, const Piece& piece, int64_t i, Chunk* out) const {
    const KvLayer& c = in.cache;
    const auto [base, offset] = piece;
    out->keys[i] = static_cast<const uint8_t*>(c.key) + base * d + offset * 4;
    out->values[i] = static_cast<const int8_t*>(c.value) + (base + offset) * d;
    out->key_scales[i] = c.key_scale + base + offset;
    out->value_scales[i] = c.value_scale + base + offset;
  }

  FE_MEMBER void prepare(const Chunk& chunk, const Chunk& next, int64_t visible) {
    for (int64_t i = 0; i < ceil_div(visible, kLeast) * kLeast; i += kLanes) {
      const int64_t n = max_i(0, min_i(kLanes, visible - i));
      const Vec scale = vmax(vset(kLeastScale), vload(chunk.value_scales[i / 16] + i % 16));
      const Vec key_scale = vkeep_n(shortened(vload(chunk.key_scales[i / 16] + i % 16)), n, vzero());
      vstore(key_scales + i, key_scale);
      vstore(key_offsets + i, vmul(key_scale, vset(-kMagic)));
      vstore(value_logs + i, vkeep_n(log2_coarse(scale), n, vset(kLowest)));
      vstore(value_inverses + i, vkeep_n(vdiv(vset(1.0f), scale), n, vzero()));
      if (i % 16 == 0) {
        prefetch(next.key_scales[i / 16]);
        prefetch(next.value_scales[i / 16]);
      }
    }
  }

  // Scores of kVecs vectors of positions from `position` on; `most` keeps the maxima of each row's lanes. kWhole: a block
  // holds them all, side by side.
  template <int kRows, int kVecs, bool kWhole, bool kAsks>
  FE_MEMBER void score(const Chunk& chunk, const Chunk& next, int64_t position, const GroupRequest& request, Vec* most, float* scores) const {
    IVec sums[kRows][kVecs];
    const uint8_t *keys[kVecs], *ahead[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = position + v * kLanes;
      keys[v] = kWhole && v > 0 ? keys[0] + v * kLanes * 4 : chunk.keys[at / 16] + at % 16 * 4;
      ahead[v] = next.keys[at / 16] + at % 16 * 4;  // not side by side: where these are a task's last, those may be two tasks'
      for (int r = 0; r < kRows; ++r) sums[r][v] = iset(starts[request.first + r]);
    }
    const int64_t stride = block_size * 4;
    const Query* query = queries + request.first * d;
    for (int64_t i = 0; i < d; i += 4, query += 4) {
      Columns key[kVecs];
      for (int v = 0; v < kVecs; ++v) {
        key[v] = key_columns(iload(keys[v]));
        keys[v] += stride;
        if (kAsks && begins_line(v)) prefetch(ahead[v]), ahead[v] += stride;
      }
      for (int r = 0; r < kRows; ++r) add_quad(sums[r], key, query + r * d);
    }
    const auto scale_all = [&](bool masked) __attribute__((always_inline)) {
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const Vec scale = vset(scales[request.first + r]);
        Vec largest = most[r];
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const int64_t at = position + v * kLanes;
          const Vec product = vfma(bits_as_floats(sums[r][v]), vload(key_scales + at), vload(key_offsets + at));
          Vec s = vfma(product, scale, vload(value_logs + at));
          if (masked) s = vkeep_n(s, max_i(0, min_i(kLanes, request.counts[r] - at)), vset(kLowest));
          largest = vmax(s, largest);
          vstore(scores + r * kChunk + at, s);
        }
        most[r] = largest;
      }
    };
    request.masked ? scale_all(true) : scale_all(false);
  }

  template <int kRows, int kVecs>
  FE_MEMBER void score(const Chunk& chunk, const Chunk& next, int64_t position, const GroupRequest& request, Vec* most, float* scores) const {
    // Neither where blocks are short nor where the last piece stands for one behind it, which nobody has asked for.
    const int64_t last = position + (kVecs - 1) * kLanes;
    const bool whole = kVecs * kLanes <= 16 || chunk.keys[last / 16] + last % 16 * 4 == chunk.keys[position / 16] + position % 16 * 4 + (kVecs - 1) * kLanes * 4;
    if (request.asks_ahead) {
      whole ? score<kRows, kVecs, true, true>(chunk, next, position, request, most, scores) : score<kRows, kVecs, false, true>(chunk, next, position, request, most, scores);
    } else {
      whole ? score<kRows, kVecs, true, false>(chunk, next, position, request, most, scores) : score<kRows, kVecs, false, false>(chunk, next, position, request, most, scores);
    }
  }

  // A row's weights so far.
  struct Weighing {
    Vec total;  // as they were before rounding
    Vec sum;    // of each lane's, with their values' scales
    IVec rounded;  // that
  };

  // Turns kVecs vectors of scores into u8 weights: what the rounded sum of a lane's weights grows by. The many small weights
  // of a long context would all become nothing if each was rounded by itself.
  template <int kVecs>
  FE_MEMBER void weigh(const float* scores, Vec level, const float* inverses, Weighing* so_far, Weight* weights) const {
    IVec bytes[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      const Vec exact = exp2_coarse(vsub(vload(scores + v * kLanes), level));
      so_far->total = vfma(exact, vload(inverses + v * kLanes), so_far->total);
      so_far->sum = vadd(so_far->sum, exact);
      const IVec rounded = to_ints(so_far->sum);
      bytes[v] = isub(rounded, so_far->rounded);
      so_far->rounded = rounded;
    }
    put_weights(bytes, weights);
  }

  // Weighted values of kVecs vectors of features from `feature` on.
  template <int kRows, int kVecs, bool kAsks>
  FE_MEMBER void add_values(const Chunk& chunk, const Chunk& next, int64_t feature, const Weight* weights, int64_t pieces, const GroupTarget& target,
                            const RowFactors& factors) const {
    IVec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) sums[r][v] = iset(kFirstSum);
    }
    const int64_t stride = d * 4;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int8_t *values = chunk.values[piece] + feature * 4, *ahead = next.values[piece] + feature * 4;
      for (int i = 0; i < 4; ++i, values += stride, ahead += stride, weights += 4) {
        Columns value[kVecs];
        for (int v = 0; v < kVecs; ++v) {
          value[v] = value_columns(iload(values + v * kLanes * 4));
          if (kAsks && begins_line(v)) prefetch(ahead + v * kLanes * 4);
        }
        for (int r = 0; r < kRows; ++r) add_quad(sums[r], value, weights + r * kChunk + (place_of_quad(i) - 4 * i));
      }
    }
    float* const out = target.out + feature;
    const auto put_all = [&](bool folds) __attribute__((always_inline)) {
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
          const Vec scaled = vfma(bits_as_floats(value_sum(sums[r][v])), vset(factors.added[r]), vset(factors.offset[r]));
          float* const to = out + r * d + v * kLanes;
          vstore(to, folds ? vfma(vload(to), vset(factors.kept[r]), scaled) : scaled);
        }
      }
    };
    target.use == Use::kFold ? put_all(true) : put_all(false);
  }

  template <int kRows, bool kAsks>
  FE_MEMBER void add_values(const Chunk& chunk, const Chunk& next, const Weight* weights, int64_t pieces, const GroupTarget& target, const RowFactors& factors) const {
    int64_t f = 0;
    for (; f + kAtOnce * kLanes <= d; f += kAtOnce * kLanes) add_values<kRows, kAtOnce, kAsks>(chunk, next, f, weights, pieces, target, factors);
    for (; f + 2 * kLanes <= d; f += 2 * kLanes) add_values<kRows, 2, kAsks>(chunk, next, f, weights, pieces, target, factors);
    for (; f < d; f += kLanes) add_values<kRows, 1, kAsks>(chunk, next, f, weights, pieces, target, factors);
  }

  template <int kRows>
  __attribute__((noinline)) void group(const Chunk& chunk, const Chunk& next, const GroupRequest& request, const GroupTarget& target) const {
    constexpr int64_t kStep = kAtOnce * kLanes;
    alignas(64) float scores[kRows * kChunk], levels[kLanes];
    alignas(64) Weight weights[kRows * kChunk];
    const int64_t most_visible = request.counts[kRows - 1], padded = ceil_div(most_visible, kLeast) * kLeast;
    Vec most[kRows], totals[kRows];
    for (int r = 0; r < kRows; ++r) most[r] = vset(kLowest);
    int64_t i = 0;
    for (; i + kStep <= padded; i += kStep) score<kRows, kAtOnce>(chunk, next, i, request, most, scores);
    for (; i < padded; i += kLeast) score<kRows, 2>(chunk, next, i, request, most, scores);
    const Vec maxima = across<kRows>(most, vmax);
    vstore(levels, vsub(maxima, vset(kLog2OfLargest)));
    for (int r = 0; r < kRows; ++r) {
      const Vec level = vset(levels[r]);
      Weighing so_far{vzero(), vzero(), iset(0)};
      for (i = 0; i + kStep <= padded; i += kStep) weigh<kAtOnce>(scores + r * kChunk + i, level, value_inverses + i, &so_far, weights + r * kChunk + i);
      for (; i < padded; i += kLeast) weigh<2>(scores + r * kChunk + i, level, value_inverses + i, &so_far, weights + r * kChunk + i);
      totals[r] = so_far.total;
    }
    RowFactors factors;
    settle(target, {maxima, across<kRows>(totals, vadd)}, kRows, &factors);
    const int64_t pieces = ceil_div(most_visible, 16);
    if (request.asks_ahead) {
      add_values<kRows, true>(chunk, next, weights, pieces, target, factors);
    } else {
      add_values<kRows, false>(chunk, next, weights, pieces, target, factors);
    }
  }
};

}  // namespace

void quantize_queries(const float* rows, int64_t num_rows, int64_t head_dim, float score_scale, int8_t* values, float* scales, int32_t* starts) {
  constexpr int64_t kTogether = 6;
  const int64_t d = head_dim;
  const auto next = [&](int64_t n) { num_rows -= n, rows += n * d, values += n * d, scales += n, starts += n; };
  for (; num_rows >= kTogether; next(kTogether)) quantize_rows<kTogether>(rows, d, score_scale, values, scales, starts);
  switch (num_rows) {
    case 1: return quantize_rows<1>(rows, d, score_scale, values, scales, starts);
    case 2: return quantize_rows<2>(rows, d, score_scale, values, scales, starts);
    case 3: return quantize_rows<3>(rows, d, score_scale, values, scales, starts);
    case 4: return quantize_rows<4>(rows, d, score_scale, values, scales, starts);
    case 5: return quantize_rows<5>(rows, d, score_scale, values, scales, starts);
    default: return;
  }
}

void attention_int8(const AttentionInput& in, const AttentionTask* tasks, const AttentionTask* end, void* scratch) {
  walk<Int8Kernel>(in, tasks, end, scratch);
}

}  // namespace FE_ISA
}  // namespace fastengine
