// Attention over an int8 cache, in integer dot products.
//
// Queries are quantized per row. A position's value scale goes into its score (as a power of two), so that
// a chunk's largest product of weight and value scale is known before the exponentials, which become u8 at
// once; the sum takes it out again.
#include "attention_walk.h"
#include "dot.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr float kLog2OfLargest = 7.99435344f;  // log2(255)
constexpr float kLeastScale = 1.0e-30f;        // of a value row of zeros

// Into the second level: the first is small beside a chunk of a long context that others push out again.
FE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#if defined(__AVX512F__)
FE_INLINE void round_to_bytes(const Vec* x, uint8_t* out) {
  const __m512i low = _mm512_packus_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
  const __m512i high = _mm512_packus_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_store_si512(out, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
}
#else
FE_INLINE void round_to_bytes(const Vec* x, uint8_t* out) {
  const __m256i words = _mm256_packus_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
  _mm_store_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(bytes));
}
#endif

// A query row as quads of s8, kGroupRows apart; returns the values' sum.
FE_INLINE int32_t quantize_query(const float* x, int64_t d, float* scale, int32_t* out) {
  Vec most = vzero();
  for (int64_t i = 0; i < d; i += kLanes) most = vmax(most, vmax(vload(x + i), vsub(vzero(), vload(x + i))));
  const float largest = vmaximum(most);
  const Vec inverse = vset(largest > 0 ? 127.0f / largest : 0.0f);
  Vec total = vzero();
  for (int64_t i = 0; i < d; i += kLanes) {
    const Vec q = vround(vmul(vload(x + i), inverse));
    total = vadd(total, q);
    alignas(16) int32_t quads[4];
#if defined(__AVX512F__)
    _mm_store_si128(reinterpret_cast<__m128i*>(quads), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(q)));
#else
    const __m256i ints = _mm256_cvtps_epi32(q);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(ints), _mm256_extracti128_si256(ints, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(quads), _mm_packs_epi16(words, words));
#endif
    for (int64_t j = 0; j < kLanes / 4; ++j) out[(i / 4 + j) * kGroupRows] = quads[j];
  }
  *scale = largest / 127.0f;
  return static_cast<int32_t>(vsum(total));
}

struct Int8Kernel {
  struct Chunk {
    const uint8_t* keys[kChunk / 16];   // [dim / 4][block_size][4]
    const int8_t* values[kChunk / 16];  // [position / 4][dim][4]
    const float *key_scales[kChunk / 16], *value_scales[kChunk / 16];
  };

  int64_t block_size, d;
  int32_t* queries;                    // [group of rows][head_dim / 4][kGroupRows] of four s8
  alignas(64) float scales[kTaskRows];
  int32_t starts[kTaskRows];           // -128 times the sum of a row's query: keys are stored plus 128
  // Of the chunk in hand; positions that nobody has written weigh nothing.
  alignas(64) float key_scales[kChunk], value_logs[kChunk], value_inverses[kChunk];

  FE_MEMBER Int8Kernel(const AttentionInput& in, const AttentionTask& task, const QueryRows& rows, void* scratch)
      : block_size(in.cache.block_size), d(in.cache.head_dim), queries(static_cast<int32_t*>(scratch)) {
    const int64_t heads = in.num_heads / in.cache.num_kv_heads;
    for (int64_t r = 0; r < task.num_queries * heads; ++r) {
      starts[r] = -128 * quantize_query(rows.at(r), d, scales + r, queries + r / kGroupRows * (d / 4) * kGroupRows + r % kGroupRows);
      scales[r] *= in.scale;
    }
  }

  FE_MEMBER Chunk chunk_of(const AttentionInput& in, const Piece* pieces) const {
    const KvLayer& c = in.cache;
    Chunk out;
    for (int64_t i = 0; i < kChunk / 16; ++i) {
      const auto [base, offset] = pieces[i];
      out.keys[i] = static_cast<const uint8_t*>(c.key) + base * c.head_dim + offset * 4;
      out.values[i] = static_cast<const int8_t*>(c.value) + (base + offset) * c.head_dim;
      out.key_scales[i] = c.key_scale + base + offset;
      out.value_scales[i] = c.value_scale + base + offset;
    }
    return out;
  }

  FE_MEMBER void prepare(const Chunk& chunk, const Chunk& next, int64_t visible) {
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      const int64_t n = max_i(0, min_i(kLanes, visible - i));
      const Vec scale = vmax(vset(kLeastScale), vload(chunk.value_scales[i / 16] + i % 16));
      vstore(key_scales + i, vkeep_n(vload(chunk.key_scales[i / 16] + i % 16), n, vzero()));
      vstore(value_logs + i, vkeep_n(log2_coarse(scale), n, vset(kLowest)));
      vstore(value_inverses + i, vkeep_n(vdiv(vset(1.0f), scale), n, vzero()));
      if (i % 16 == 0) {
        prefetch(next.key_scales[i / 16]);
        prefetch(next.value_scales[i / 16]);
      }
    }
  }

  // Dot products of a group's queries with kAtOnce vectors of positions, [kRows][kAtOnce * kLanes]. kWhole: a
  // block holds them all, side by side.
  template <int kRows, bool kWhole>
  FE_MEMBER void dot_keys(const Chunk& chunk, const Chunk& next, int64_t position, int64_t first, int32_t* out) const {
    IVec sums[kRows][kAtOnce];
    const uint8_t *keys[kAtOnce], *ahead[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      const int64_t at = position + v * kLanes;
      keys[v] = kWhole && v > 0 ? keys[0] + v * kLanes * 4 : chunk.keys[at / 16] + at % 16 * 4;
      ahead[v] = kWhole && v > 0 ? ahead[0] + v * kLanes * 4 : next.keys[at / 16] + at % 16 * 4;
      for (int r = 0; r < kRows; ++r) sums[r][v] = iset(starts[first + r]);
    }
    const int64_t quads = d / 4, stride = block_size * 4;
    const int32_t* query = queries + first * quads;
    for (int64_t i = 0; i < quads; ++i, query += kGroupRows) {
      IVec key[kAtOnce];
      for (int v = 0; v < kAtOnce; ++v) {
        key[v] = iload(keys[v]);
        prefetch(ahead[v]);
        keys[v] += stride;
        ahead[v] += stride;
      }
      for (int r = 0; r < kRows; ++r) {
        const IVec q = iset(query[r]);
        for (int v = 0; v < kAtOnce; ++v) add_dots(sums[r][v], key[v], q);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kAtOnce; ++v) istore(out + (r * kAtOnce + v) * kLanes, sums[r][v]);
    }
  }

  // From those, scores at `position` of their rows; `most` keeps the maxima of each row's lanes.
  template <int kRows, bool kMasked>
  FE_MEMBER void score(const int32_t* dots, int64_t position, int64_t first, const int64_t* counts, float* most, float* scores) const {
    for (int r = 0; r < kRows; ++r) {
      const Vec scale = vset(scales[first + r]);
      Vec largest = vload(most + r * kLanes);
      for (int v = 0; v < kAtOnce; ++v) {
        const int64_t at = position + v * kLanes;
        Vec s = vfma(vmul(to_floats(iload(dots + (r * kAtOnce + v) * kLanes)), vload(key_scales + at)), scale, vload(value_logs + at));
        if (kMasked) s = vkeep_n(s, max_i(0, min_i(kLanes, counts[r] - at)), vset(kLowest));
        largest = vmax(s, largest);
        vstore(scores + r * kChunk + at, s);
      }
      vstore(most + r * kLanes, largest);
    }
  }

  // Turns a row's scores into u8 weights, and returns their sum as it was before rounding. What rounding takes from a
  // weight its lane's next one gets: the many small ones of a long context would all become nothing else.
  FE_MEMBER float weigh(const float* scores, float maximum, int64_t padded, uint8_t* weights) const {
    const Vec level = vset(maximum - kLog2OfLargest);
    Vec totals[kAtOnce], carried[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) totals[v] = carried[v] = vzero();
    for (int64_t i = 0; i < padded; i += kAtOnce * kLanes) {
      Vec p[kAtOnce];
      for (int v = 0; v < kAtOnce; ++v) {
        const Vec exact = exp2_coarse(vsub(vload(scores + i + v * kLanes), level)), wanted = vadd(exact, carried[v]);
        totals[v] = vfma(exact, vload(value_inverses + i + v * kLanes), totals[v]);
        p[v] = vround(wanted);
        carried[v] = vsub(wanted, p[v]);
      }
      round_to_bytes(p, weights + i);
    }
    Vec total = vadd(totals[0], totals[1]);
    for (int v = 2; v < kAtOnce; v += 2) total = vadd(total, vadd(totals[v], totals[v + 1]));
    return vsum(total);
  }

  // Weighted values of kVecs vectors of features from `feature` on.
  template <int kRows, int kVecs>
  FE_MEMBER void add_values(const Chunk& chunk, const Chunk& next, int64_t feature, const int32_t* weights, int64_t pieces, const GroupTarget& target,
                            const RowFactors& factors) const {
    IVec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) sums[r][v] = iset(0);
    }
    const int64_t stride = d * 4;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int8_t *values = chunk.values[piece] + feature * 4, *ahead = next.values[piece] + feature * 4;
      for (int i = 0; i < 4; ++i, values += stride, ahead += stride, ++weights) {
        IVec value[kVecs];
        for (int v = 0; v < kVecs; ++v) {
          value[v] = iload(values + v * kLanes * 4);
          prefetch(ahead + v * kLanes * 4);
        }
        for (int r = 0; r < kRows; ++r) {
          const IVec p = iset(weights[r * (kChunk / 4)]);
          for (int v = 0; v < kVecs; ++v) add_dots(sums[r][v], p, value[v]);
        }
      }
    }
    float* const out = target.out + feature;
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) put(target, factors, r, to_floats(sums[r][v]), out + r * d + v * kLanes);
    }
  }

  template <int kRows>
  __attribute__((noinline)) void group(const Chunk& chunk, const Chunk& next, int64_t first, const int64_t* counts, bool masked, const GroupTarget& target) const {
    constexpr int64_t kStep = kAtOnce * kLanes;
    alignas(64) float scores[kRows * kChunk];
    alignas(64) int32_t dots[kRows * kStep], weights[kRows * kChunk / 4];
    alignas(64) float most[kRows * kLanes], maxima[kLanes], sums[kLanes];
    const int64_t most_visible = counts[kRows - 1], padded = ceil_div(most_visible, kStep) * kStep;
    for (int r = 0; r < kRows; ++r) vstore(most + r * kLanes, vset(kLowest));
    for (int64_t i = 0; i < padded; i += kStep) {
      if (block_size % kStep == 0) {
        dot_keys<kRows, true>(chunk, next, i, first, dots);
      } else {
        dot_keys<kRows, false>(chunk, next, i, first, dots);
      }
      if (masked) {
        score<kRows, true>(dots, i, first, counts, most, scores);
      } else {
        score<kRows, false>(dots, i, first, counts, most, scores);
      }
    }
    for (int r = 0; r < kRows; ++r) maxima[r] = vmaximum(vload(most + r * kLanes));
    for (int r = 0; r < kRows; ++r) sums[r] = weigh(scores + r * kChunk, maxima[r], padded, reinterpret_cast<uint8_t*>(weights + r * (kChunk / 4)));
    RowFactors factors;
    settle(target, maxima, sums, kRows, &factors);
    const int64_t pieces = ceil_div(most_visible, 16);
    int64_t f = 0;
    for (; f + kAtOnce * kLanes <= d; f += kAtOnce * kLanes) add_values<kRows, kAtOnce>(chunk, next, f, weights, pieces, target, factors);
    for (; f + 2 * kLanes <= d; f += 2 * kLanes) add_values<kRows, 2>(chunk, next, f, weights, pieces, target, factors);
    for (; f < d; f += kLanes) add_values<kRows, 1>(chunk, next, f, weights, pieces, target, factors);
  }
};

}  // namespace

void attention_int8(const AttentionInput& in, const AttentionTask* tasks, const AttentionTask* end, void* scratch) {
  walk<Int8Kernel>(in, tasks, end, scratch);
}

}  // namespace FE_ISA
}  // namespace fastengine
