// Planning of paged attention and its entry point.
#include "attention.h"
#include "device/numeric.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 512;

FE_DEVICE int inclusive_sum(int value, int* scratch) {
#pragma unroll
  for (int by = 1; by < kWarp; by *= 2) {
    const int below = __shfl_up_sync(kAllLanes, value, by);
    if (lane_id() >= by) value += below;
  }
  if (lane_id() == kWarp - 1) scratch[warp_id()] = value;
  __syncthreads();
  for (int w = 0; w < warp_id(); ++w) value += scratch[w];
  return value;
}

// Turns counts (one per sequence, given by `count_of`) into starts, and notes each piece's sequence.
template <typename CountOf>
FE_DEVICE int lay_out(const CountOf& count_of, int num_seqs, int32_t* starts, int32_t* seq_of, int* scratch) {
  int total = 0;
  for (int first = 0; first < num_seqs; first += kThreads) {
    const int seq = first + static_cast<int>(threadIdx.x);
    const int count = seq < num_seqs ? count_of(seq) : 0;
    const int end = total + inclusive_sum(count, scratch);
    if (seq < num_seqs) starts[seq] = end - count;
    __syncthreads();
    if (threadIdx.x == kThreads - 1) scratch[0] = end;
    __syncthreads();
    total = scratch[0];
    __syncthreads();
  }
  if (threadIdx.x == 0) starts[num_seqs] = total;
  __syncthreads();
  for (int seq = warp_id(); seq < num_seqs; seq += kThreads / kWarp) {
    for (int i = starts[seq] + lane_id(); i < starts[seq + 1]; i += kWarp) seq_of[i] = seq;
  }
  return total;
}

__global__ void __launch_bounds__(kThreads) attention_plan_kernel(const AttentionPlanArgs a) {
  FE_SHARED_ARRAY(int, scratch, kThreads / kWarp);
  const int num_seqs = static_cast<int>(a.num_seqs);
  const int64_t group = a.num_heads / a.num_kv_heads;
  int32_t* const decode_starts = a.plan + 4;
  int32_t* const tile_starts = decode_starts + num_seqs + 1;
  int32_t* const tile_seqs = tile_starts + num_seqs + 1;
  int32_t* const piece_seqs = tile_seqs + max_tiles(num_seqs, a.num_tokens, group);
  const auto length = [&](int seq) { return a.query_starts[seq + 1] - a.query_starts[seq]; };
  const auto pieces = [&](int seq) {
    const int64_t context = a.context_lens[seq];
    return length(seq) == 1 ? static_cast<int>(num_pieces(context - first_visible(context - 1, a.sliding_window))) : 0;
  };
  const auto tiles = [&](int seq) { return length(seq) > 1 ? static_cast<int>(ceil_div(length(seq), tile_tokens(group))) : 0; };
  const int num_decode = lay_out(pieces, num_seqs, decode_starts, piece_seqs, scratch);
  const int num_tiles = lay_out(tiles, num_seqs, tile_starts, tile_seqs, scratch);
  if (threadIdx.x == 0) a.plan[0] = num_decode, a.plan[1] = num_tiles, a.plan[2] = 0, a.plan[3] = 0;
}

bool supported(const AttentionArgs& a) {
  const bool types = (a.dtype == kBFloat16 || a.dtype == kFloat16) && (a.cache_dtype == a.dtype || a.cache_dtype == kInt8 || a.cache_dtype == kFp8E4M3);
  const bool blocks = a.block_size >= 8 && (a.block_size & (a.block_size - 1)) == 0;
  const bool heads = a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0 && a.num_heads / a.num_kv_heads <= kTileRows;
  const auto fits = [](int64_t size) { return size > 0 && size <= 256 && size % 16 == 0; };
  const bool sizes = fits(a.head_size) && fits(a.value_size) && a.query_stride % 8 == 0;
  return types && blocks && heads && sizes;
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(attention_workspace, AttentionWorkspaceArgs) {
  using namespace fastengine::cuda;
  (void)stream;
  const int64_t group = args->num_heads / args->num_kv_heads, pieces = max_pieces(args->num_seqs, args->max_blocks * args->block_size);
  *args->plan_ints = 4 + 2 * (args->num_seqs + 1) + max_tiles(args->num_seqs, args->num_tokens, group) + pieces;
  *args->partial_floats = pieces * args->num_heads * (args->value_size + 2);
  return 0;
}

FE_OPERATOR(attention_plan, AttentionPlanArgs) {
  using namespace fastengine::cuda;
  if (args->num_seqs <= 0) return 0;
  return launch(attention_plan_kernel, dim3(1), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), *args);
}

FE_OPERATOR(paged_attention, AttentionArgs) {
  using namespace fastengine::cuda;
  if (!supported(*args)) return kUnsupported;
  if (args->num_tokens == 0) return 0;
  const int status = launch_decode(*args, static_cast<cudaStream_t>(stream));
  if (status != 0 || args->max_query_tokens == 1 || args->num_tokens == 1) return status;
  const auto prefill = args->wide_prefill != 0 && has_wide_prefill(*args) ? launch_wide_prefill : launch_prefill;
  return prefill(*args, static_cast<cudaStream_t>(stream));
}
