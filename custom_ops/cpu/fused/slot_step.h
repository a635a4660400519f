// A step of decodes alone, read straight from the worker's persistent batch; several of them run without anything between.
//
// Between two such steps an interpreter would need a few hundred microseconds, most of it to fetch its own
// code and objects, which the step has pushed out of the caches. What is unusual is left to it.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/args.h"
#include "views.h"

namespace fastengine {
namespace fused {

// One row per slot; custom_ops/fused_slots.py fills it.
struct SlotArrays {
  int64_t max_num_seqs, tokens_per_slot, blocks_per_slot;  // rows, and the widths of `tokens` and `block_table`
  int64_t block_size, num_cache_blocks, kv_type;
  int32_t* tokens;
  int32_t* num_tokens;
  const int32_t *block_table, *num_blocks;
  const uint8_t *occupied, *failed;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t* seeds;
  const uint8_t* adjusted;
  const int32_t* num_logprobs;
  void* const* key_caches;
  void* const* value_caches;
  float* const* key_scales;
  float* const* value_scales;
  float* logits;  // [max_num_seqs][vocab], written where a slot is not greedy
};

// A step's inputs, in memory that is kept from one to the next.
class SlotStep {
 public:
  // False where a row is anything but a plain decode: the caller has to look at it more closely.
  bool gather(const SlotArrays& a, const ModelShape& shape, const int32_t* slots, int64_t count);

  // Valid until the next gather(); tokens go to `token_out`.
  StepArgs args(const SlotArrays& a, int32_t* token_out);

  // Whether all of the step's hidden states, and the logits of the tokens, are numbers.
  bool all_finite(const SlotArrays& a, const ModelShape& shape, const int32_t* token_out) const;

 private:
  int64_t count_ = 0, width_ = 0;  // of block_tables_
  bool greedy_ = true;
  std::vector<int32_t> token_ids_, positions_, slot_mapping_, query_starts_, context_lens_, block_tables_, rows_;
  std::vector<float> hidden_;
  std::vector<float> temperature_, top_p_, min_p_;
  std::vector<int32_t> top_k_;
  std::vector<int64_t> seeds_;
  RowSamplingArgs sampling_{};
};

// Adds each slot's token.
void append_tokens(const SlotArrays& a, const int32_t* slots, int64_t count, const int32_t* token_ids);

}  // namespace fused
}  // namespace fastengine
