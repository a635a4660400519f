// What the fused step reads: plain structs of pointers and sizes, nothing of a framework or of the
// standard library, so that kernels compiled for one instruction set leave no code for another's.
#pragma once

#include <cstdint>

namespace fastengine {

struct RowSamplingArgs;  // kernels/args.h

namespace fused {

// Output columns lie in panels of 32: two vectors of 16 accumulators on AVX-512, four of 8 on AVX2.
constexpr int64_t kPanel = 32;
// Weights of a block of 32 k's share a scale or a step, and so do a row's activations, or those of two blocks. K is padded to whole blocks.
constexpr int64_t kBlockK = 32;
// Rows of activations that one GEMM tile computes together.
constexpr int64_t kTileRows = 16;
// More greedy rows read the whole LM head at once. The screen's are a tile at most; where there is an instruction for dot products, it
// gains by what it does not read, and without one by nibbles, whose products cost half of bytes' as well.
constexpr int64_t rows_screened(bool has_dots) { return has_dots ? 2 : kTileRows; }

enum class Layout : int32_t {
  kFloat32 = 0,  // [panel][k][32] float: for checking
  kInt8 = 1,     // [panel][k / 32][1088 bytes], value = scale * (u8 - 128): see pack.h
  kInt4 = 2,     // [panel][k / 64][1088 bytes], steps and minima, value = scale * step * nibble + minimum: see pack.h
};

enum class KvType : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// y[n] = sum over k of x[k] * w[n][k] (+ bias[n]).
struct LinearView {
  Layout layout;
  int64_t n, k;        // as the model has them
  int64_t padded_k;    // multiple of kBlockK
  int64_t num_panels;  // of kPanel columns, the last one padded
  int64_t panel_bytes;
  int64_t group_blocks;  // blocks that share a scale in its activations: 1, or of int4 2
  const uint8_t* weights;
  const float* bias;  // [num_panels * 32], or null
};

struct LayerView {
  const float *input_norm, *post_attention_norm;  // [hidden]
  const float *query_norm, *key_norm;             // [head_dim], or null
  LinearView qkv;                                 // q rows, then k, then v
  LinearView output;
  LinearView gate_up;  // 16 gate columns and the 16 up columns of the same features share a panel
  LinearView down;
};

struct ModelShape {
  int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, vocab;
  int64_t rotary_dim, max_position;
  int64_t rope_interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  int64_t tied;              // the LM head is the embedding table
  float rms_epsilon;
  float attention_scale;
};

struct ModelView {
  ModelShape shape;
  const float* cos_sin;  // [max_position][rotary_dim], cosines then sines
  const LayerView* layers;
  LinearView embedding;  // [vocab][hidden]
  LinearView head;       // the same when tied
  LinearView screen;     // the head once more in four bits, for arg maxima; without weights: there is none
  const float* final_norm;
};

// One step over T tokens of S sequences; see custom_ops/fused.py for the meaning of each array.
// Inside a block, keys lie transposed so that a vector holds one feature of many positions:
//
//   float32, bfloat16   key [block][head][dim][position]           value [block][head][position][dim]
//   int8                key [block][head][dim / 4][position][4]    value [block][head][position / 4][dim][4]
//
// with one float scale per position and head beside int8.
struct StepArgs {
  int64_t num_tokens, num_seqs, num_samples, max_blocks, block_size;
  int64_t kv_type;  // KvType
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* slot_mapping;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  const int32_t* sample_rows;
  void* const* key_caches;    // [num_layers]
  void* const* value_caches;  // [num_layers]
  float* const* key_scales;   // [num_layers][num_blocks][kv_heads][block_size], null unless int8
  float* const* value_scales;
  float* logits;       // [num_samples][vocab], or null
  int32_t* token_out;  // [num_samples]: argmax, -1 where no logit is a number; or null
  float* hidden_out;   // [num_samples][hidden] after the last norm, or null
  // [num_samples][hidden] of an earlier step's hidden_out: only their logits are computed, num_tokens is 0.
  const float* hidden_in;
  // How tokens are drawn, into token_out, from `logits`, which it may change; null: argmax.
  RowSamplingArgs* sampling;
};

}  // namespace fused
}  // namespace fastengine
