// What the decode and the prefill kernel of paged attention share.
#pragma once

#include "args.h"
#include "parallel.h"

namespace fastengine {
namespace FE_ISA {

// Below every finite score: a row's maximum before its first key.
constexpr float kNoScore = -3.0e38f;

// One sequence's view of the caches for one KV head.
template <typename Cache>
struct KvView {
  const Cache* keys;
  const Cache* values;
  const int32_t* blocks;  // the sequence's row of the block table
  int64_t head, num_kv_heads, block_size, head_size, value_size;

  int64_t row(int64_t position) const {
    const int64_t block = blocks[position / block_size];
    return (block * num_kv_heads + head) * block_size + position % block_size;
  }
  const Cache* key(int64_t position) const { return keys + row(position) * head_size; }
  const Cache* value(int64_t position) const { return values + row(position) * value_size; }
  // How many of `wanted` positions from `position` on lie in one block, hence one after the other.
  int64_t run(int64_t position, int64_t wanted) const { return min_i(wanted, block_size - position % block_size); }
};

template <typename Cache>
FE_INLINE KvView<Cache> kv_view(const AttentionArgs& a, int64_t seq, int64_t head) {
  return {static_cast<const Cache*>(a.key_cache),
          static_cast<const Cache*>(a.value_cache),
          a.block_tables + seq * a.max_blocks,
          head,
          a.num_kv_heads,
          a.block_size,
          a.head_size,
          a.value_size};
}

// The first position that a query at `position` sees.
FE_INLINE int64_t first_visible(const AttentionArgs& a, int64_t position) {
  return a.sliding_window > 0 ? max_i(0, position - a.sliding_window + 1) : 0;
}

// Turns scores[begin, end) into weights e^(score - new maximum) and everything else in [0, n) into 0;
// n is a multiple of kLanes. Updates the row's running maximum and sum, and returns what its earlier
// output has to be multiplied by.
FE_INLINE float softmax_step(float* scores, int64_t begin, int64_t end, int64_t n, float* maximum, float* sum) {
  const Vec none = vset(kNoScore);
  Vec largest = none;
  for (int64_t i = 0; i < n; i += kLanes) {
    Vec score = vload(scores + i);
    if (i + kLanes > end) score = vkeep_n(score, max_i(0, end - i), none);
    if (i < begin) score = vkeep_n(none, min_i(kLanes, begin - i), score);
    vstore(scores + i, score);
    largest = vmax(score, largest);
  }
  const float new_maximum = vmaximum(vmax(largest, vset(*maximum)));
  Vec total = vzero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec weight = vexp(vsub(vload(scores + i), vset(new_maximum)));
    vstore(scores + i, weight);
    total = vadd(total, weight);
  }
  float rescale[kLanes];
  vstore(rescale, vexp(vset(*maximum - new_maximum)));
  *maximum = new_maximum;
  *sum = *sum * rescale[0] + vsum(total);
  return rescale[0];
}

// Decode (one query of a sequence) and prefill (several): both run as tasks of one parallel job.
int64_t decode_splits(const AttentionArgs& args, int64_t seq);
void decode_task(const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t split, float* partial);
void merge_decode(const AttentionArgs& args, int64_t seq, int64_t kv_head, const float* partials, int64_t num_splits);
int64_t decode_partial_size(const AttentionArgs& args);

int64_t prefill_tiles(const AttentionArgs& args, int64_t seq);
void prefill_task(const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t tile);

}  // namespace FE_ISA
}  // namespace fastengine
