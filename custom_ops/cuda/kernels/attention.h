// What planning, decode and prefill of paged attention share: how a batch is cut into pieces of work.
//
//   plan    [0] number of decode pieces   [1] number of prefill tiles   [2], [3] unused
//           [4 ..]                 decode_starts[num_seqs + 1]: first piece of each sequence
//           [.. num_seqs + 1]      tile_starts[num_seqs + 1]: first tile of each sequence
//           [.. max pieces]        piece -> sequence
//           [.. max tiles]         tile -> sequence
//
// A sequence with one query row decodes; with more, it is prefill. A decode piece is a range of context
// whose length follows from the sequence's own visible context alone, so results do not depend on the batch.
#pragma once

#include "args.h"
#include "device/platform.h"

namespace fastengine {
namespace cuda {

constexpr int kMaxPieces = 32;       // per sequence
constexpr int kMinPieceTokens = 256;
constexpr int kTileRows = 128;       // rows (token, head of a group) of a prefill tile
constexpr float kLog2E = 1.4426950408889634f;
// Below every finite score; no -inf, so that differences stay numbers.
constexpr float kNoScore = -1.0e30f;

FE_HOST_DEVICE int64_t piece_tokens(int64_t visible) { return larger<int64_t>(kMinPieceTokens, round_up(ceil_div(visible, kMaxPieces), 64)); }
FE_HOST_DEVICE int64_t num_pieces(int64_t visible) { return ceil_div(visible, piece_tokens(visible)); }
FE_HOST_DEVICE int64_t first_visible(int64_t position, int64_t sliding_window) { return sliding_window > 0 ? larger<int64_t>(0, position - sliding_window + 1) : 0; }

FE_HOST_DEVICE int64_t max_pieces(int64_t num_seqs, int64_t max_context) {
  // Longer contexts may have fewer pieces than shorter ones, never more than this.
  return num_seqs * smaller<int64_t>(kMaxPieces, ceil_div(max_context, kMinPieceTokens));
}

// Query tokens of a prefill tile; the heads of a group lie side by side in its rows.
FE_HOST_DEVICE int64_t tile_tokens(int64_t group) { return larger<int64_t>(1, kTileRows / group); }
FE_HOST_DEVICE int64_t max_tiles(int64_t num_seqs, int64_t num_tokens, int64_t group) { return ceil_div(num_tokens, tile_tokens(group)) + num_seqs; }

struct PlanView {
  const int32_t* plan;
  int64_t num_seqs;
  int64_t num_tiles_max;

  FE_HOST_DEVICE int num_decode() const { return plan[0]; }
  FE_HOST_DEVICE int num_tiles() const { return plan[1]; }
  FE_HOST_DEVICE const int32_t* decode_starts() const { return plan + 4; }
  FE_HOST_DEVICE const int32_t* tile_starts() const { return decode_starts() + num_seqs + 1; }
  FE_HOST_DEVICE const int32_t* tile_seqs() const { return tile_starts() + num_seqs + 1; }
  FE_HOST_DEVICE const int32_t* piece_seqs() const { return tile_seqs() + num_tiles_max; }
};

FE_HOST_DEVICE PlanView plan_view(const AttentionArgs& a) { return {a.plan, a.num_seqs, max_tiles(a.num_seqs, a.num_tokens, a.num_heads / a.num_kv_heads)}; }

// One KV head's rows in the paged cache.
struct PagedRows {
  const int32_t* blocks;  // the sequence's block table
  int64_t head, num_kv_heads;
  int shift;  // block_size = 1 << shift

  FE_DEVICE int64_t row_in(int32_t block, int position) const {
    return ((static_cast<int64_t>(block) * num_kv_heads + head) << shift) + (position & ((1 << shift) - 1));
  }
};

FE_HOST_DEVICE int log2_of(int64_t power) {
  int shift = 0;
  while ((int64_t{1} << shift) < power) ++shift;
  return shift;
}

// Adds up the pieces of every sequence that has several.
int launch_merge(const AttentionArgs& args, cudaStream_t stream);
int launch_decode(const AttentionArgs& args, cudaStream_t stream);
int launch_prefill(const AttentionArgs& args, cudaStream_t stream);
// By wgmma, where has_wide_prefill says so.
bool has_wide_prefill(const AttentionArgs& args);
int launch_wide_prefill(const AttentionArgs& args, cudaStream_t stream);

}  // namespace cuda
}  // namespace fastengine
