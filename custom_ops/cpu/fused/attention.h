// Paged attention of the fused step.
//
// Every query row walks its context in chunks of 128 positions that begin at multiples of 128. A chunk's
// result stands for itself (its own maximum, sum and weighted values); results are folded into the row's
// state in the order of the chunks. So a row's result depends on its own sequence alone, whether it is one
// of a prefill or a decode, and whether one thread walks all chunks or several share them.
// Method: flash-decoding (Dao et al., 2023) over an online softmax (Milakov and Gimelshein, 2018).
#pragma once

#include "activations.h"

namespace fastengine {
namespace FE_ISA {

using namespace fused;

constexpr int64_t kRowsCopied = 2;  // that few rows of activations each thread quantizes for itself: see workspace.h
constexpr int64_t kChunk = 128;    // positions
constexpr int64_t kTaskRows = 96;  // (query, head) rows of one task at most
constexpr int kGroupRows = kLanes == 16 ? 6 : 4;  // of which this many are computed together
constexpr int kAtOnce = kLanes == 16 ? 4 : 2;     // vectors of positions or features beside them

// One layer's cache and the step's tables.
struct KvLayer {
  KvType type;
  void *key, *value;
  float *key_scale, *value_scale;
  int64_t block_size, num_kv_heads, head_dim;
};

// Chunks [first_chunk, last_chunk) of the context of `num_queries` queries from token `first_token` on, of one
// sequence, with one KV head.
struct AttentionTask {
  int32_t first_token, num_queries, first_position, kv_head, seq;
  int32_t first_chunk, last_chunk;
  int32_t split;  // the one this task is part of, or -1: it walks all chunks
  int32_t is_new;  // the sequence's one token, whose key and value are still to be stored
  int32_t first_row;  // of AttentionInput::out
};

// Tasks of the same queries that share the chunks: each leaves its chunks' results in `partials`, and the
// one that ends last folds them together.
struct AttentionSplit {
  int64_t partials_at;  // in AttentionInput::partials
  int32_t num_tasks, num_chunks;
};

// What rotates rows of queries, and of a sequence of one token its key, which attention stores with its value: they are
// read right after, and need no phase of their own.
struct NewRows {
  const float* cos_sin;
  int64_t rotary_dim;
  bool interleaved;
  const float *query_norm, *key_norm;  // or null
  float epsilon;
  const int32_t *positions, *slot_mapping;
};

// Queries over an int8 cache, rotated and in eight bits, with what else attention knows of them.
struct FinishedQueries {
  int64_t num_rows;
  int8_t* values;   // [num_heads][num_rows][head_dim]
  float* scales;    // [num_heads][num_rows], of scores
  int32_t* starts;  // [num_heads][num_rows]: kMagic's bits less 128 times the sum of a row, which cancels that keys are stored plus 128
};

struct AttentionInput {
  KvLayer cache;
  const float* qkv;  // [tokens][qkv_stride], as QKV left it; unless there are
  FinishedQueries finished;  // whose keys and values are stored as well; or null
  int64_t qkv_stride;
  float* out;  // [rows][num_heads * head_dim], of those that are not quantized at once
  Activations context;  // where those go: see whole_tiles()
  int64_t num_heads;
  const int32_t* block_tables;
  int64_t max_blocks;
  float scale;  // of the scores, in powers of two
  const AttentionSplit* splits;
  uint32_t* arrived;  // [splits]: tasks that have ended, zero before the first
  float* partials;
  NewRows new_rows;
};

// Tiles of the next linear's activations that a run of queries has all rows of: their outputs are quantized at once.
struct WholeTiles {
  int64_t first, last;
};

// Of features that are whole groups, whatever the number of blocks in one.
FE_INLINE bool quantizes_tiles(int64_t num_rows, int64_t features) { return num_rows > kRowsCopied && features % (2 * kBlockK) == 0; }
FE_INLINE WholeTiles whole_tiles(int64_t first_row, int64_t count, int64_t num_rows) {
  const int64_t end = first_row + count;
  return {ceil_div(first_row, kTileRows), end == num_rows ? ceil_div(end, kTileRows) : end / kTileRows};
}

// Floats of one chunk's results: maxima and sums of as many rows as fill vectors, weighted values [rows][head_dim].
FE_INLINE int64_t padded_rows(int64_t num_rows) { return ceil_div(num_rows, kLanes) * kLanes; }
FE_INLINE int64_t partial_floats(int64_t num_rows, int64_t head_dim) { return 2 * padded_rows(num_rows) + num_rows * head_dim; }

// Stores one token's key and value row of one head at `slot`.
void write_kv(const KvLayer& cache, int64_t slot, int64_t head, const float* key, const float* value);
// Asks for the memory of an int8 cache that write_kv() is going to write.
void expect_kv(const KvLayer& cache, int64_t slot, int64_t head);
// In an int8 cache: rows [num_rows][head_dim] of one head, but for those whose slot is negative.
void write_keys(const KvLayer& cache, const int32_t* slots, int64_t num_rows, int64_t head, const float* rows);
void write_values(const KvLayer& cache, const int32_t* slots, int64_t num_rows, int64_t head, const float* rows);

// Rows [num_rows][head_dim] of rotated queries, as FinishedQueries has them.
void quantize_queries(const float* rows, int64_t num_rows, int64_t head_dim, float score_scale, int8_t* values, float* scales, int32_t* starts);

int64_t attention_scratch_bytes(int64_t head_dim, int64_t rotary_dim);
// Walks the first of `tasks`; those from there on to `end` are what this thread will probably walk afterwards.
void attention_float(const AttentionInput& in, const AttentionTask* tasks, const AttentionTask* end, void* scratch);
void attention_int8(const AttentionInput& in, const AttentionTask* tasks, const AttentionTask* end, void* scratch);

FE_INLINE void attention(const AttentionInput& in, const AttentionTask* tasks, const AttentionTask* end, void* scratch) {
  if (in.cache.type == KvType::kInt8) {
    attention_int8(in, tasks, end, scratch);
  } else {
    attention_float(in, tasks, end, scratch);
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
