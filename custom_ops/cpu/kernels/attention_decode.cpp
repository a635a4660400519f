// Paged attention of one query per sequence: one task per KV head and piece of the context.
//
// Pieces have a fixed length and are merged in order, so a sequence's result depends on nothing but
// itself. Method: flash-decoding (Dao et al., 2023).
#include "attention.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int64_t kSplit = 512;  // positions per task
constexpr int64_t kChunk = 64;   // positions per softmax step; scores of a chunk stay in L1

// scores[g][i] for `count` keys that lie one after the other, for kHeads query heads.
template <int kHeads, typename Cache>
void score_run(const float* query, int64_t padded, const Cache* keys, int64_t head_size, int64_t count, float scale, float* scores) {
  const int64_t full = head_size / kLanes * kLanes;
  for (int64_t i = 0; i < count; i += 4) {
    const int64_t n = min_i(4, count - i);
    // Past the end the last key is read again; its score is not stored.
    const Cache* row[4];
    for (int64_t u = 0; u < 4; ++u) row[u] = keys + (i + min_i(u, n - 1)) * head_size;
    Vec sums[kHeads][4];
    for (int g = 0; g < kHeads; ++g) {
      for (int u = 0; u < 4; ++u) sums[g][u] = vzero();
    }
    const auto step = [&](int64_t j, const Vec* key) {
      for (int g = 0; g < kHeads; ++g) {
        const Vec q = vload(query + g * padded + j);
        for (int u = 0; u < 4; ++u) sums[g][u] = vfma(q, key[u], sums[g][u]);
      }
    };
    for (int64_t j = 0; j < full; j += kLanes) {
      const Vec key[4] = {load_as_float(row[0] + j), load_as_float(row[1] + j), load_as_float(row[2] + j), load_as_float(row[3] + j)};
      step(j, key);
    }
    if (full < head_size) {
      Vec key[4];
      for (int u = 0; u < 4; ++u) key[u] = load_as_float_n(row[u] + full, head_size - full);
      step(full, key);
    }
    for (int g = 0; g < kHeads; ++g) {
      const __m128 score = _mm_mul_ps(vsum4(sums[g][0], sums[g][1], sums[g][2], sums[g][3]), _mm_set1_ps(scale));
      float four[4];
      _mm_storeu_ps(four, score);
      for (int64_t u = 0; u < n; ++u) scores[g * kChunk + i + u] = four[u];
    }
  }
}

// out[g][0:value_size] += weights[g][i] * values[i] over `count` consecutive values.
template <int kHeads, int kVecs, typename Cache>
FE_INLINE void add_columns(const float* weights, const Cache* values, int64_t value_size, int64_t count, float* out, int64_t padded, int64_t lanes) {
  Vec sums[kHeads][kVecs];
  for (int g = 0; g < kHeads; ++g) {
    for (int v = 0; v < kVecs; ++v) sums[g][v] = vload(out + g * padded + v * kLanes);
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      const Cache* const p = values + i * value_size + v * kLanes;
      const Vec value = lanes == kLanes ? load_as_float(p) : load_as_float_n(p, lanes);
      for (int g = 0; g < kHeads; ++g) sums[g][v] = vfma(vset(weights[g * kChunk + i]), value, sums[g][v]);
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int v = 0; v < kVecs; ++v) vstore(out + g * padded + v * kLanes, sums[g][v]);
  }
}

template <int kHeads, typename Cache>
void add_values(const float* weights, const Cache* values, int64_t value_size, int64_t count, float* out, int64_t padded) {
  constexpr int kVecs = kLanes == 16 ? 4 : 2;
  int64_t j = 0;
  for (; j + kVecs * kLanes <= value_size; j += kVecs * kLanes) {
    add_columns<kHeads, kVecs>(weights, values + j, value_size, count, out + j, padded, kLanes);
  }
  for (; j < value_size; j += kLanes) {
    add_columns<kHeads, 1>(weights, values + j, value_size, count, out + j, padded, min_i(kLanes, value_size - j));
  }
}

// Up to four query heads of one KV head. `state` holds each head's maximum, sum, then output.
struct HeadGroup {
  const float* query;  // [heads][padded]
  float* scores;       // [heads][kChunk]
  float* maximum;
  float* sum;
  float* out;  // [heads][padded_value]
  int64_t padded, padded_value;
};

template <int kHeads, typename Cache>
void attend(const AttentionArgs& a, const KvView<Cache>& kv, const HeadGroup& group, int64_t begin, int64_t end) {
  for (int64_t chunk = begin; chunk < end; chunk += kChunk) {
    const int64_t count = min_i(kChunk, end - chunk);
    for (int64_t i = 0, n; i < count; i += n) {
      n = kv.run(chunk + i, count - i);
      score_run<kHeads>(group.query, group.padded, kv.key(chunk + i), a.head_size, n, a.scale, group.scores + i);
    }
    for (int g = 0; g < kHeads; ++g) {
      const float rescale = softmax_step(group.scores + g * kChunk, 0, count, kChunk, group.maximum + g, group.sum + g);
      if (rescale == 1.0f) continue;
      float* const out = group.out + g * group.padded_value;
      for (int64_t j = 0; j < group.padded_value; j += kLanes) vstore(out + j, vmul(vload(out + j), vset(rescale)));
    }
    for (int64_t i = 0, n; i < count; i += n) {
      n = kv.run(chunk + i, count - i);
      add_values<kHeads>(group.scores + i, kv.value(chunk + i), a.value_size, n, group.out, group.padded_value);
    }
  }
}

int64_t padded_to_lanes(int64_t n) { return ceil_div(n, 16) * 16; }

template <typename Cache>
void decode_split(const AttentionArgs& a, int64_t seq, int64_t kv_head, int64_t begin, int64_t end, float* partial) {
  const int64_t heads = a.num_heads / a.num_kv_heads, padded = padded_to_lanes(a.head_size), padded_value = padded_to_lanes(a.value_size);
  float* const scratch = static_cast<float*>(thread_scratch((4 * padded + 4 * kChunk) * static_cast<int64_t>(sizeof(float))));
  float* const scores = scratch + 4 * padded;
  for (int64_t i = 0; i < 4 * kChunk; i += kLanes) vstore(scores + i, vzero());
  const KvView<Cache> kv = kv_view<Cache>(a, seq, kv_head);
  const float* const query = a.query + (a.query_starts[seq] * a.num_heads + kv_head * heads) * a.head_size;
  for (int64_t first = 0; first < heads; first += 4) {
    const int64_t n = min_i(4, heads - first);
    for (int64_t g = 0; g < n; ++g) {
      for (int64_t j = 0; j < padded; j += kLanes) {
        vstore(scratch + g * padded + j, vload_n(query + (first + g) * a.head_size + j, max_i(0, min_i(kLanes, a.head_size - j))));
      }
    }
    const HeadGroup group{scratch, scores, partial + first, partial + heads + first, partial + 2 * heads + first * padded_value, padded, padded_value};
    for (int64_t g = 0; g < n; ++g) group.maximum[g] = kNoScore, group.sum[g] = 0.0f;
    for (int64_t j = 0; j < n * padded_value; j += kLanes) vstore(group.out + j, vzero());
    switch (n) {
      case 1: attend<1>(a, kv, group, begin, end); break;
      case 2: attend<2>(a, kv, group, begin, end); break;
      case 3: attend<3>(a, kv, group, begin, end); break;
      default: attend<4>(a, kv, group, begin, end); break;
    }
  }
}

}  // namespace

int64_t decode_splits(const AttentionArgs& args, int64_t seq) {
  const int64_t position = args.context_lens[seq] - 1;
  return ceil_div(position + 1 - first_visible(args, position), kSplit);
}

int64_t decode_partial_size(const AttentionArgs& args) {
  return args.num_heads / args.num_kv_heads * (2 + padded_to_lanes(args.value_size));
}

void decode_task(const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t split, float* partial) {
  const int64_t end = args.context_lens[seq], begin = first_visible(args, end - 1) + split * kSplit;
  if (args.cache_is_bf16) {
    decode_split<uint16_t>(args, seq, kv_head, begin, min_i(end, begin + kSplit), partial);
  } else {
    decode_split<float>(args, seq, kv_head, begin, min_i(end, begin + kSplit), partial);
  }
}

void merge_decode(const AttentionArgs& args, int64_t seq, int64_t kv_head, const float* partials, int64_t num_splits) {
  const int64_t heads = args.num_heads / args.num_kv_heads, size = decode_partial_size(args), padded_value = padded_to_lanes(args.value_size);
  for (int64_t g = 0; g < heads; ++g) {
    float* const out = args.out + (args.query_starts[seq] * args.num_heads + kv_head * heads + g) * args.value_size;
    float maximum = kNoScore;
    for (int64_t s = 0; s < num_splits; ++s) maximum = partials[s * size + g] > maximum ? partials[s * size + g] : maximum;
    float sum = 0.0f;
    for (int64_t s = 0; s < num_splits; ++s) {
      const float* const partial = partials + s * size;
      const Vec scale = vexp(vset(partial[g] - maximum));
      float factor[kLanes];
      vstore(factor, scale);
      sum += partial[heads + g] * factor[0];
      const float* const values = partial + 2 * heads + g * padded_value;
      for (int64_t j = 0; j < args.value_size; j += kLanes) {
        const int64_t lanes = min_i(kLanes, args.value_size - j);
        const Vec before = s == 0 ? vzero() : vload_n(out + j, lanes);
        vstore_n(out + j, vfma(vload(values + j), scale, before), lanes);
      }
    }
    const Vec inverse = vset(1.0f / sum);
    for (int64_t j = 0; j < args.value_size; j += kLanes) {
      const int64_t lanes = min_i(kLanes, args.value_size - j);
      vstore_n(out + j, vmul(vload_n(out + j, lanes), inverse), lanes);
    }
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
