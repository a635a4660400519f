#include "slot_step.h"

#include <algorithm>
#include <cmath>

namespace fastengine {
namespace fused {

bool SlotStep::gather(const SlotArrays& a, const ModelShape& shape, const int32_t* slots, int64_t count) {
  if (count == 0 || count > a.max_num_seqs) return false;
  count_ = count;
  greedy_ = true;
  int32_t longest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t slot = slots[i];
    if (slot < 0 || slot >= a.max_num_seqs || !a.occupied[slot] || a.failed[slot] || a.adjusted[slot] || a.num_logprobs[slot] >= 0) return false;
    const int32_t length = a.num_tokens[slot];
    if (length < 1 || length >= a.tokens_per_slot || length > shape.max_position || length > a.num_blocks[slot] * a.block_size) return false;
    longest = std::max(longest, length);
    greedy_ = greedy_ && a.temperature[slot] == 0.0f;
  }
  width_ = (longest + a.block_size - 1) / a.block_size;
  const size_t size = static_cast<size_t>(count);
  for (auto* column : {&token_ids_, &positions_, &slot_mapping_, &context_lens_, &rows_}) column->resize(size);
  query_starts_.resize(size + 1);
  block_tables_.assign(size * static_cast<size_t>(width_), 0);
  hidden_.resize(size * static_cast<size_t>(shape.hidden));
  for (int64_t i = 0; i < count; ++i) {
    const int32_t slot = slots[i], length = a.num_tokens[slot], position = length - 1;
    const int32_t token = a.tokens[slot * a.tokens_per_slot + position];
    if (token < 0 || token >= shape.vocab) return false;
    const int32_t* const table = a.block_table + slot * a.blocks_per_slot;
    for (int64_t b = 0; b * a.block_size < length; ++b) {
      if (table[b] < 0 || table[b] >= a.num_cache_blocks) return false;
      block_tables_[static_cast<size_t>(i * width_ + b)] = table[b];
    }
    const size_t at = static_cast<size_t>(i);
    token_ids_[at] = token;
    positions_[at] = position;
    slot_mapping_[at] = static_cast<int32_t>(table[position / a.block_size] * a.block_size + position % a.block_size);
    context_lens_[at] = length;
    query_starts_[at] = rows_[at] = static_cast<int32_t>(i);
  }
  query_starts_[size] = static_cast<int32_t>(count);
  if (greedy_) return true;
  const auto take = [&](auto* column, const auto* values) {
    column->resize(size);
    for (size_t i = 0; i < size; ++i) (*column)[i] = values[slots[i]];
  };
  take(&temperature_, a.temperature);
  take(&top_k_, a.top_k);
  take(&top_p_, a.top_p);
  take(&min_p_, a.min_p);
  take(&seeds_, a.seeds);
  return true;
}

StepArgs SlotStep::args(const SlotArrays& a, int32_t* token_out) {
  StepArgs s{};
  s.num_tokens = s.num_seqs = s.num_samples = count_;
  s.max_blocks = width_;
  s.block_size = a.block_size;
  s.kv_type = a.kv_type;
  s.token_ids = token_ids_.data();
  s.positions = positions_.data();
  s.slot_mapping = slot_mapping_.data();
  s.query_starts = query_starts_.data();
  s.context_lens = context_lens_.data();
  s.block_tables = block_tables_.data();
  s.sample_rows = rows_.data();
  s.key_caches = a.key_caches;
  s.value_caches = a.value_caches;
  s.key_scales = a.key_scales;
  s.value_scales = a.value_scales;
  s.token_out = token_out;
  s.hidden_out = hidden_.data();
  if (greedy_) return s;
  s.logits = a.logits;
  sampling_ = {};
  // Drawn with the number of tokens that were there, as everywhere: the draw does not depend on the batch.
  sampling_.draw = {nullptr, temperature_.data(), top_k_.data(), top_p_.data(), min_p_.data(), seeds_.data(), context_lens_.data(), nullptr, 0, 0};
  s.sampling = &sampling_;
  return s;
}

bool SlotStep::all_finite(const SlotArrays& a, const ModelShape& shape, const int32_t* token_out) const {
  for (int64_t i = 0; i < count_; ++i) {
    float sum = 0.0f;
    for (int64_t h = 0; h < shape.hidden; ++h) sum += hidden_[static_cast<size_t>(i * shape.hidden + h)];
    if (!std::isfinite(sum) || token_out[i] < 0) return false;
    if (!greedy_ && !std::isfinite(a.logits[i * shape.vocab + token_out[i]])) return false;
  }
  return true;
}

void append_tokens(const SlotArrays& a, const int32_t* slots, int64_t count, const int32_t* token_ids) {
  for (int64_t i = 0; i < count; ++i) a.tokens[slots[i] * a.tokens_per_slot + a.num_tokens[slots[i]]++] = token_ids[i];
}

}  // namespace fused
}  // namespace fastengine
