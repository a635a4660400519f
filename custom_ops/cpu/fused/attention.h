// Paged attention of the fused step.
//
// Every query row walks its context in chunks of 128 positions that begin at multiples of 128, with the
// same operations in the same order whether it is one of a prefill or a decode: its result depends on
// its own sequence alone.
#pragma once

#include "../kernels/simd.h"
#include "views.h"

namespace fastengine {
namespace FE_ISA {

using namespace fused;

constexpr int64_t kChunk = 128;    // positions
constexpr int64_t kTaskRows = 24;  // (query, head) rows of one task at most
constexpr int kGroupRows = kLanes == 16 ? 6 : 4;  // of which this many are computed together
constexpr int kAtOnce = kLanes == 16 ? 4 : 2;     // vectors of positions or features beside them

// One layer's cache and the step's tables.
struct KvLayer {
  KvType type;
  void *key, *value;
  float *key_scale, *value_scale;
  int64_t block_size, num_kv_heads, head_dim;
};

// `num_queries` queries from token `first_token` on, of one sequence, with one KV head.
struct AttentionTask {
  int32_t first_token, num_queries, first_position, kv_head, seq;
};

struct AttentionInput {
  KvLayer cache;
  const float* qkv;  // [tokens][qkv_stride], query rows already rotated
  int64_t qkv_stride;
  float* out;  // [tokens][num_heads * head_dim]
  int64_t num_heads;
  const int32_t* block_tables;
  int64_t max_blocks;
  float scale;  // of the scores, in powers of two
};

FE_INLINE int64_t queries_per_task(int64_t heads_per_kv) { return max_i(1, kTaskRows / heads_per_kv); }

// Stores one token's key and value row of one head at `slot`.
void write_kv(const KvLayer& cache, int64_t slot, int64_t head, const float* key, const float* value);

int64_t attention_scratch_bytes(int64_t head_dim);
void attention_float(const AttentionInput& in, const AttentionTask& task, void* scratch);
void attention_int8(const AttentionInput& in, const AttentionTask& task, void* scratch);

FE_INLINE void attention(const AttentionInput& in, const AttentionTask& task, void* scratch) {
  if (in.cache.type == KvType::kInt8) {
    attention_int8(in, task, scratch);
  } else {
    attention_float(in, task, scratch);
  }
}

// What a task keeps of each of its rows: maximum and sum so far, and the output [head_dim] not yet
// divided by the sum.
struct RowState {
  float maximum, sum;
};

// 2^x of x <= 0.
FE_INLINE Vec vexp2(Vec x) {
#if defined(__AVX512F__)
  const Vec whole = vround(x), part = vsub(x, whole);
  Vec p = vset(1.5403530e-4f);
  p = vfma(p, part, vset(1.3333558e-3f));
  p = vfma(p, part, vset(9.6181291e-3f));
  p = vfma(p, part, vset(5.5504109e-2f));
  p = vfma(p, part, vset(2.4022651e-1f));
  p = vfma(p, part, vset(6.9314718e-1f));
  p = vfma(p, part, vset(1.0f));
  return _mm512_scalef_ps(p, whole);
#else
  return vexp(vmul(x, vset(0.69314718f)));
#endif
}

// Turns the first `count` of a row's scores (in powers of two) into 2^(score - maximum), those behind them
// up to `padded` (a multiple of kLanes) into 0, and returns the factor by which what was summed before
// must shrink.
FE_INLINE float softmax_chunk(float* scores, int64_t count, int64_t padded, RowState* state) {
  Vec most = vset(-3.0e38f);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) most = vmax(most, vload(scores + i));
  if (i < count) most = vmax(most, vkeep_n(vload(scores + i), count - i, vset(-3.0e38f)));
  const float before = state->maximum, largest = vmaximum(most), now = largest > before ? largest : before;
  const Vec level = vset(now);
  Vec total = vzero();
  for (i = 0; i + kLanes <= count; i += kLanes) {
    const Vec p = vexp2(vsub(vload(scores + i), level));
    vstore(scores + i, p);
    total = vadd(total, p);
  }
  for (; i < padded; i += kLanes) {
    const Vec p = vkeep_n(vexp2(vsub(vload(scores + i), level)), max_i(0, count - i), vzero());
    vstore(scores + i, p);
    total = vadd(total, p);
  }
  alignas(64) float shrink[kLanes];
  vstore(shrink, vexp2(vset(before - now)));
  state->maximum = now;
  state->sum = state->sum * shrink[0] + vsum(total);
  return shrink[0];
}

}  // namespace FE_ISA
}  // namespace fastengine
