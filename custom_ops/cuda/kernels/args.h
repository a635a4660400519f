// What the launchers take: raw pointers and sizes, nothing of a framework. Sizes and strides count elements.
//
// One field per line, `type name;`: abi.py reads the structures from this file.
// A dtype is a value of DType. All pointers are device memory, 16-byte aligned.
#pragma once

#include <cstdint>

namespace fastengine {
namespace cuda {

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kFp8E4M3 = 4 };

// What launchers return: 0, a cudaError_t (positive), or this.
constexpr int kUnsupported = -1;

// out[r] = x[r] / rms(x[r]) * weight. With `residual`, residual[r] += x[r] first, and that sum is normalised.
struct RmsNormArgs {
  const void* x;         // [num_rows, row_size]
  void* residual;        // [num_rows, row_size], or null
  const void* weight;    // [row_size]
  void* out;             // [num_rows, row_size]; may be x
  int64_t num_rows;
  int64_t row_size;      // a multiple of 8, at most 32768
  int32_t dtype;         // of x, residual and out: float32, bfloat16 or float16
  int32_t weight_dtype;  // float32 or dtype
  float epsilon;
};

// out = silu(gate) * up
struct SiluMulArgs {
  const void* gate_up;  // [num_rows, 2 * half]: gate, then up
  void* out;            // [num_rows, half]
  int64_t num_rows;
  int64_t half;         // a multiple of 8
  int32_t dtype;        // float32, bfloat16 or float16
};

// Per-head norm, rotary embedding, KV-cache write.
struct RotaryArgs {
  const void* query;            // rows of num_heads * head_size, query_stride apart
  const void* key;              // rows of num_kv_heads * head_size, key_stride apart
  const void* value;            // rows of num_kv_heads * value_size, value_stride apart
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  void* query_out;              // may be query
  void* key_out;                // may be key, or null when only the cache wants it
  int64_t query_out_stride;
  int64_t key_out_stride;
  const void* query_norm;       // [head_size], or null
  const void* key_norm;         // [head_size], or null
  const int32_t* positions;     // [num_tokens]
  const float* cos_sin;         // [max positions, rotary_dim]: cosines, then sines
  const int32_t* slot_mapping;  // [num_tokens]: block * block_size + offset; -1: do not store
  void* key_cache;              // [num_blocks, num_kv_heads, block_size, head_size]
  void* value_cache;            // [num_blocks, num_kv_heads, block_size, value_size]
  float* key_scale;             // [num_blocks, num_kv_heads, block_size]: what a stored key is multiplied by; or null
  float* value_scale;           // likewise; int8 needs both, fp8 may do without
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;            // a multiple of 8, at most 256
  int64_t value_size;           // a multiple of 8, at most 256
  int64_t rotary_dim;           // even, at most head_size
  int64_t block_size;
  int32_t dtype;                // float32, bfloat16 or float16
  int32_t norm_dtype;           // float32 or dtype
  int32_t cache_dtype;          // dtype, int8 or fp8
  int32_t interleaved;          // pairs (2i, 2i + 1), else (i, i + rotary_dim / 2)
  float epsilon;
};

// target[target_ids[i]] = source[source_ids[i]] for every pool; null ids mean i itself.
struct BlockCopyArgs {
  const void* const* sources;  // host array of num_pools device (or mapped host) pointers
  void* const* targets;        // host array of num_pools device (or mapped host) pointers
  const int32_t* source_ids;   // [num_blocks], or null
  const int32_t* target_ids;   // [num_blocks], or null
  int64_t num_pools;
  int64_t num_blocks;
  int64_t block_bytes;         // a multiple of 16
};

// Cuts a batch into pieces of work for paged_attention; one plan serves all layers with the same window.
struct AttentionPlanArgs {
  const int32_t* query_starts;  // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  int32_t* plan;                // plan_ints of fe_attention_workspace
  int64_t num_seqs;
  int64_t num_tokens;
  int64_t sliding_window;       // 0: none
  int64_t num_heads;
  int64_t num_kv_heads;
};

// Causal attention of a ragged batch over the paged cache.
//
// Row j of a sequence with n query rows is at position p = context_len - n + j and sees positions up to p,
// of these the last sliding_window ones only, if that is not 0.
struct AttentionArgs {
  const void* query;            // [num_tokens, num_heads, head_size], tokens query_stride apart
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, head_size]
  const void* value_cache;      // [num_blocks, num_kv_heads, block_size, value_size]
  const float* key_scale;       // [num_blocks, num_kv_heads, block_size], or null
  const float* value_scale;     // likewise
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  const int32_t* query_starts;  // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]: tokens in the cache, this step's included
  const float* sinks;           // [num_heads]: a further score of each row, of a value that is zero; or null
  const int32_t* plan;          // from attention_plan with the same batch and window
  float* partials;              // partial_floats of fe_attention_workspace
  void* out;                    // [num_tokens, num_heads, value_size]
  int64_t query_stride;
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t max_blocks;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_size;
  int64_t value_size;
  int64_t block_size;           // a power of two, at least 8
  int64_t sliding_window;
  int64_t max_query_tokens;     // of one sequence, if the caller knows; 0 if not. 1 leaves the prefill kernel out
  int32_t dtype;                // bfloat16 or float16
  int32_t cache_dtype;          // dtype, int8 or fp8
  int32_t wide_prefill;         // 1: several rows by wgmma where card, sizes and cache have it; 0: by mma
  float scale;
};

// Attention over the latent cache of multi-head latent attention (DeepSeek-V2, 2024), for sequences of one query
// row; the rows of others are left alone. Takes AttentionArgs with these meanings:
//
//   query         [num_tokens, num_heads, head_size]: 512 values in the latent space, then the rotary part
//   key_cache     [num_blocks, block_size, head_size]: the same of every token; value_cache is null
//   out           [num_tokens, num_heads, value_size]: in the latent space
//   head_size 576, value_size 512, num_kv_heads 1, cache_dtype equal to dtype, no scales, no sinks, wide_prefill unused

// How much memory a plan and the partial results of a batch need, at most.
struct AttentionWorkspaceArgs {
  int64_t num_seqs;
  int64_t num_tokens;
  int64_t max_blocks;
  int64_t block_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t value_size;
  int64_t* plan_ints;       // host memory, written
  int64_t* partial_floats;  // host memory, written
};

// The id of each row's largest logit; ties: the lowest id; NaN counts as -inf.
struct ArgmaxArgs {
  const float* logits;  // [num_rows, vocab_size]
  int32_t* token_ids;   // [num_rows]
  int64_t num_rows;
  int64_t vocab_size;
};

// One token per row; filters, random numbers and greedy rows as in the Python face.
struct SampleArgs {
  const float* logits;       // [num_rows, vocab_size]
  const float* temperature;  // [num_rows], and the following
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;
  const int32_t* positions;
  int32_t* token_ids;
  int64_t num_rows;
  int64_t vocab_size;        // at most 2^20
};

// Repetition, frequency and presence penalties, then biases, in place.
struct PenaltyArgs {
  float* logits;                 // [num_rows, vocab_size]
  const float* repetition;       // [num_rows]
  const float* presence;         // [num_rows]
  const float* frequency;        // [num_rows]
  const int32_t* token_ids;      // every row's known tokens, prompt then output
  const int32_t* row_starts;     // [num_rows + 1] into token_ids
  const int32_t* output_starts;  // [num_rows] into token_ids
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* bias_starts;    // [num_rows + 1] into bias_ids
  int64_t num_rows;
  int64_t vocab_size;
};

// logits[rows[i], v] = -inf where bit v of mask i is not set.
struct BitmaskArgs {
  float* logits;        // [.., vocab_size]
  const int32_t* mask;  // [num_masks, ceil(vocab_size / 32)], bit v % 32 of word v / 32
  const int32_t* rows;  // [num_masks]
  int64_t num_masks;
  int64_t vocab_size;
};

// Log-probabilities of given tokens and of the k most likely.
struct LogprobArgs {
  const float* logits;       // [num_rows, vocab_size]
  const int32_t* token_ids;  // [num_rows]
  float* logprobs;           // [num_rows]
  int32_t* ranks;            // [num_rows]
  int32_t* top_ids;          // [num_rows, k]
  float* top_logprobs;       // [num_rows, k]
  int64_t num_rows;
  int64_t vocab_size;        // at most 2^20
  int64_t k;                 // at most 1024
};

// The top_k experts of each token and their weights; of equal scores the lower expert.
struct MoeGateArgs {
  const float* logits;        // [num_tokens, num_experts]
  const float* bias;          // [num_experts]: added for choosing only, or null
  int32_t* expert_ids;        // [num_tokens, top_k], the best first
  float* weights;             // [num_tokens, top_k]
  int64_t num_tokens;
  int64_t num_experts;        // at most 1024
  int64_t top_k;              // at most 32
  int64_t num_groups;         // of neighbouring experts; 1: no groups
  int64_t top_groups;         // experts of other than the best groups are out
  int32_t sigmoid;            // scores: 1 sigmoid, 0 softmax over all experts
  int32_t group_by_top2;      // a group's score: 1 the sum of its two best, 0 its best
  int32_t renormalize;        // weights add up to scaling
  float scaling;
};

// Sorts (token, choice) pairs by expert, in their order within one.
struct MoePermuteArgs {
  const int32_t* expert_ids;  // [num_pairs]
  int32_t* expert_starts;     // [num_experts + 1]: first row of each local expert, all multiples of align
  int32_t* pair_of_row;       // [max_rows]: -1 in rows that fill up to align
  int32_t* row_of_pair;       // [num_pairs]: -1 for experts that are not local
  int64_t num_pairs;          // tokens * top_k
  int64_t first_expert;       // local experts are first_expert .. first_expert + num_experts - 1
  int64_t num_experts;        // at most 1024
  int64_t align;
  int64_t max_rows;           // at least num_pairs + num_experts * (align - 1)
};

// rows[r] = x[pair_of_row[r] / top_k], zeros where that is -1.
struct MoeGatherArgs {
  const void* x;               // [num_tokens, row_size]
  const int32_t* pair_of_row;  // [num_rows]
  void* rows;                  // [num_rows, row_size]
  int64_t num_rows;
  int64_t row_size;            // a multiple of 8
  int64_t top_k;
  int32_t dtype;               // bfloat16 or float16
};

// out[t] = base[t] + sum over j of weights[t, j] * rows[row_of_pair[t * top_k + j]], in order of j.
struct MoeCombineArgs {
  const void* rows;            // [.., row_size]
  const void* base;            // [num_tokens, row_size], or null
  const int32_t* row_of_pair;  // [num_tokens * top_k]
  const float* weights;        // [num_tokens, top_k]
  void* out;                   // [num_tokens, row_size]; may be base
  int64_t num_tokens;
  int64_t row_size;            // a multiple of 8
  int64_t top_k;
  int32_t dtype;               // bfloat16 or float16
};

// out[t, n] = sum over k of x[t, k] * (q[n, k] - zero[n, k / group]) * scale[n, k / group] (+ bias[n])
//
// The q are unsigned, 4 or 8 bits, laid out as pack_weight of linear.py says.
struct QuantizedGemmArgs {
  const void* x;         // [num_rows, in_size]
  const void* weight;    // in_size * out_size * bits / 8 bytes
  const float* scales;   // [in_size / group_size, out_size]
  const uint8_t* zeros;  // likewise; or null: 8 for 4 bits, 128 for 8
  const void* bias;      // [out_size], or null
  void* out;             // [num_rows, out_size]
  int64_t num_rows;
  int64_t in_size;       // a multiple of group_size and of 64
  int64_t out_size;      // a multiple of 32
  int64_t group_size;    // a multiple of 32
  int32_t bits;          // 4 or 8
  int32_t dtype;         // of x, bias and out: bfloat16 or float16
};

// One matrix product and one load of matrices by a single warp, to check what each lane holds.
struct FragmentProbeArgs {
  const uint32_t* a;         // [32, 4] registers of each lane
  const uint32_t* b;         // [32, 2]
  const void* matrices;      // [4, 8, 8]
  float* d;                  // [32, 4], added to
  uint32_t* loaded;          // [32, 4]
  int32_t dtype;             // bfloat16 or float16
  int32_t transposed;
};

// One product of a warpgroup, 64 x 16 by 16 x 128, with operands anywhere in an image of shared memory that begins at a
// multiple of 1,024 bytes (kernels/device/warpgroup.h); unsupported but on sm_90.
struct ProductProbeArgs {
  const void* image;       // [image_bytes]
  const uint32_t* left;    // [128, 4] registers of each thread, used with in_registers
  float* d;                // [128, 64] registers of each thread
  int64_t image_bytes;     // a multiple of 16
  int32_t left_begin;      // bytes into the image, and the following
  int32_t left_stride;
  int32_t right_begin;
  int32_t right_leading;
  int32_t right_stride;
  int32_t in_registers;
  int32_t across;          // a row of the right operand in memory is one of the 16
  int32_t adds;            // to d, else overwrites it
  int32_t dtype;           // bfloat16 or float16
};

}  // namespace cuda
}  // namespace fastengine
