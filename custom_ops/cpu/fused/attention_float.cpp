// Attention over a float32 or bfloat16 cache.
#include "attention_walk.h"

namespace fastengine {
namespace FE_ISA {
namespace {

template <typename T>
struct FloatKernel {
  struct Chunk {
    const T *keys[kChunk / 16];  // [dim][block_size]
    const T *values[kChunk / 16];  // [position][dim]
  };

  int64_t block_size, d;
  float* queries;  // [rows][head_dim], scaled

  FE_MEMBER FloatKernel(const AttentionInput& in, void* scratch) : block_size(in.cache.block_size), d(in.cache.head_dim), queries(static_cast<float*>(scratch)) {}

  FE_MEMBER bool take_finished(const AttentionInput&, const AttentionTask&) { return false; }

  FE_MEMBER void take(const AttentionInput& in, const float* rows, int64_t num_rows) {
    for (int64_t i = 0; i < num_rows * d; i += kLanes) vstore(queries + i, vmul(vload(rows + i), vset(in.scale)));
  }

  FE_MEMBER void place(const AttentionInput& in, const Piece& piece, int64_t i, Chunk* out) const {
    out->keys[i] = static_cast<const T*>(in.cache.key) + piece.base * d + piece.offset;
    out->values[i] = static_cast<const T*>(in.cache.value) + (piece.base + piece.offset) * d;
  }

  FE_MEMBER void prepare(const Chunk&, const Chunk&, int64_t) {}

  // Scores of kAtOnce vectors of positions from `position` on, and their maxima into `most`.
  template <int kRows>
  FE_MEMBER void score(const Chunk& chunk, int64_t position, int64_t first, const int64_t* counts, Vec* most, float* scores) const {
    Vec sums[kRows][kAtOnce];
    const T* keys[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      keys[v] = chunk.keys[(position + v * kLanes) / 16] + (position + v * kLanes) % 16;
      for (int r = 0; r < kRows; ++r) sums[r][v] = vzero();
    }
    for (int64_t i = 0; i < d; ++i) {
      Vec key[kAtOnce];
      for (int v = 0; v < kAtOnce; ++v) key[v] = load_as_float(keys[v] + i * block_size);
      for (int r = 0; r < kRows; ++r) {
        const Vec q = vset(queries[(first + r) * d + i]);
        for (int v = 0; v < kAtOnce; ++v) sums[r][v] = vfma(q, key[v], sums[r][v]);
      }
    }
    for (int v = 0; v < kAtOnce; ++v) {
      const int64_t at = position + v * kLanes;
      for (int r = 0; r < kRows; ++r) {
        const Vec s = vkeep_n(sums[r][v], max_i(0, min_i(kLanes, counts[r] - at)), vset(kLowest));
        most[r] = vmax(s, most[r]);
        vstore(scores + r * kChunk + at, s);
      }
    }
  }

  // Turns a row's scores into weights, and returns their sum.
  FE_MEMBER float weigh(float* scores, float maximum, int64_t padded) const {
    const Vec level = vset(maximum);
    Vec total = vzero();
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec p = exp2_fine(vsub(vload(scores + i), level));
      vstore(scores + i, p);
      total = vadd(total, p);
    }
    return vsum(total);
  }

  // Weighted values of kVecs vectors of features from `feature` on.
  template <int kRows, int kVecs>
  FE_MEMBER void add_values(const Chunk& chunk, int64_t feature, const float* weights, int64_t count, const GroupTarget& target, const RowFactors& factors) const {
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) sums[r][v] = vzero();
    }
    for (int64_t i = 0; i < count; ++i) {
      const T* const row = chunk.values[i / 16] + i % 16 * d + feature;
      Vec value[kVecs];
      for (int v = 0; v < kVecs; ++v) value[v] = load_as_float(row + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec p = vset(weights[r * kChunk + i]);
        for (int v = 0; v < kVecs; ++v) sums[r][v] = vfma(p, value[v], sums[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) put(target, factors, r, vmul(sums[r][v], vset(factors.added[r])), target.out + r * d + feature + v * kLanes);
    }
  }

  template <int kRows>
  __attribute__((noinline)) void group(const Chunk& chunk, const Chunk&, const GroupRequest& request, const GroupTarget& target) const {
    constexpr int64_t kStep = kAtOnce * kLanes;
    const int64_t *const counts = request.counts, first = request.first;
    alignas(64) float scores[kRows * kChunk];
    alignas(64) float maxima[kLanes], sums[kLanes];
    const int64_t most_visible = counts[kRows - 1], padded = ceil_div(most_visible, kStep) * kStep;
    Vec most[kRows];
    for (int r = 0; r < kRows; ++r) most[r] = vset(kLowest);
    for (int64_t i = 0; i < padded; i += kStep) score<kRows>(chunk, i, first, counts, most, scores);
    for (int r = 0; r < kRows; ++r) maxima[r] = vmaximum(most[r]);
    for (int r = 0; r < kRows; ++r) sums[r] = weigh(scores + r * kChunk, maxima[r], padded);
    RowFactors factors;
    settle(target, {vload(maxima), vload(sums)}, kRows, &factors);
    int64_t f = 0;
    for (; f + kAtOnce * kLanes <= d; f += kAtOnce * kLanes) add_values<kRows, kAtOnce>(chunk, f, scores, most_visible, target, factors);
    for (; f + 2 * kLanes <= d; f += 2 * kLanes) add_values<kRows, 2>(chunk, f, scores, most_visible, target, factors);
    for (; f < d; f += kLanes) add_values<kRows, 1>(chunk, f, scores, most_visible, target, factors);
  }
};

}  // namespace

int64_t attention_scratch_bytes(int64_t head_dim, int64_t rotary_dim) { return (3 * kTaskRows * head_dim + rotation_floats(head_dim, rotary_dim)) * 4; }

void attention_float(const AttentionInput& in, const AttentionTask* tasks, const AttentionTask* end, void* scratch) {
  if (in.cache.type == KvType::kBfloat16) {
    walk<FloatKernel<uint16_t>>(in, tasks, end, scratch);
  } else {
    walk<FloatKernel<float>>(in, tasks, end, scratch);
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
