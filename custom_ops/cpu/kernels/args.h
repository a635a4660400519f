// What the launchers take: raw pointers and sizes, nothing of a framework. Sizes count elements.
#pragma once

#include <cstdint>

namespace fastengine {

// Rotate query and key and store key and value in the paged cache; see rotary_write_kv.
struct RotaryArgs {
  const float* query;  // rows of num_heads * head_size, query_stride apart
  const float* key;    // rows of num_kv_heads * head_size, key_stride apart
  const float* value;  // rows of num_kv_heads * value_size, value_stride apart
  int64_t query_stride, key_stride, value_stride;
  float* query_out;  // may be query
  float* key_out;    // may be key, or null when only the cache wants it
  int64_t query_out_stride, key_out_stride;
  const float* query_norm;  // [head_size], or null
  const float* key_norm;    // [head_size], or null
  float epsilon;
  const int32_t* positions;
  const float* cos_sin;         // [max positions, rotary_dim]
  const int32_t* slot_mapping;  // -1: do not store
  void* key_cache;              // [num_blocks, num_kv_heads, block_size, head_size]
  void* value_cache;            // [num_blocks, num_kv_heads, block_size, value_size]
  bool cache_is_bf16;
  bool interleaved;
  int64_t num_tokens, num_heads, num_kv_heads, head_size, value_size, rotary_dim, block_size;
};

struct AttentionArgs {
  const float* query;            // [num_tokens, num_heads, head_size]
  const void* key_cache;         // [num_blocks, num_kv_heads, block_size, head_size]
  const void* value_cache;       // [num_blocks, num_kv_heads, block_size, value_size]
  const int32_t* block_tables;   // [num_seqs, max_blocks]
  const int32_t* query_starts;   // [num_seqs + 1]
  const int32_t* context_lens;   // [num_seqs]
  float* out;                    // [num_tokens, num_heads, value_size]
  bool cache_is_bf16;
  float scale;
  int64_t sliding_window;  // 0: none
  int64_t num_seqs, max_blocks, num_heads, num_kv_heads, head_size, value_size, block_size;
};

struct SampleArgs {
  const float* logits;  // [num_rows, vocab_size]
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int32_t* positions;
  int32_t* token_ids;
  int64_t num_rows, vocab_size;
};

struct PenaltyArgs {
  float* logits;  // [num_rows, vocab_size]
  const float* repetition;
  const float* presence;
  const float* frequency;
  const int32_t* token_ids;
  const int32_t* row_starts;     // [num_rows] into token_ids
  const int32_t* row_ends;       // [num_rows] into token_ids
  const int32_t* output_starts;  // [num_rows] into token_ids
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* bias_starts;  // [num_rows + 1] into bias_ids
  int64_t num_rows, vocab_size;
};

struct LogprobArgs {
  const float* logits;  // [num_rows, vocab_size]
  const int32_t* token_ids;
  int64_t k;
  float* logprobs;      // [num_rows]
  int32_t* ranks;       // [num_rows]
  int32_t* top_ids;     // [num_rows, k]
  float* top_logprobs;  // [num_rows, k]
  int64_t num_rows, vocab_size;
};

// All that lies between a step's logits and its tokens; custom_ops/fused_sampling.py fills it.
struct RowSamplingArgs {
  SampleArgs draw;
  PenaltyArgs adjust;         // its row_starts null: no row has penalties or biases
  const uint8_t* allowed;     // [masks, vocab_size]: 0 forbids
  const int32_t* mask_of;     // [num_rows]: the row's mask, or -1; null: there is none
  LogprobArgs logprobs;
  const int32_t* wanted;      // [num_rows]: negative: no log-probabilities of this row; null: of none
  int64_t from_processed;     // they are of what is drawn from, instead of the raw logits
};

}  // namespace fastengine
