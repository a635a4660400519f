// Mixture of experts around the expert GEMMs: choose, sort tokens by expert, gather, combine.
//
// Grouped choice as in DeepSeek-V2 and V3 (2024). Nothing depends on the order of atomics. Target for gather and
// combine: 85 % of copy bandwidth.
#include "device/numeric.h"
#include "device/reduce.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;

struct Choice {
  float score;
  int expert;
};

// The best of all lanes, in all lanes.
FE_DEVICE Choice warp_best(Choice mine) {
#pragma unroll
  for (int bits = kWarp / 2; bits > 0; bits /= 2) {
    const Choice other{__shfl_xor_sync(kAllLanes, mine.score, bits), __shfl_xor_sync(kAllLanes, mine.expert, bits)};
    if (other.score > mine.score || (other.score == mine.score && other.expert < mine.expert)) mine = other;
  }
  return mine;
}

// The best of `scores`[begin, end) by the whole warp; its entry becomes -inf.
FE_DEVICE Choice take_best(float* scores, int begin, int end) {
  Choice best{-INFINITY, end};
  for (int e = begin + lane_id(); e < end; e += kWarp) {
    if (scores[e] > best.score) best = {scores[e], e};
  }
  best = warp_best(best);
  __syncwarp();
  if (lane_id() == 0 && best.expert < end) scores[best.expert] = -INFINITY;
  __syncwarp();
  return best;
}

// scores[e] for choosing and weights[e] of one token.
FE_DEVICE void score_experts(const MoeGateArgs& a, const float* logits, float* scores, float* weights) {
  const int experts = static_cast<int>(a.num_experts);
  float maximum = -INFINITY, sum = 0.0f;
  if (a.sigmoid == 0) {
    for (int e = lane_id(); e < experts; e += kWarp) maximum = fmaxf(maximum, logits[e]);
    maximum = warp_reduce(maximum, Maximum());
    for (int e = lane_id(); e < experts; e += kWarp) sum += __expf(logits[e] - maximum);
    sum = warp_reduce(sum, Sum());
  }
  for (int e = lane_id(); e < experts; e += kWarp) {
    const float weight = a.sigmoid != 0 ? 1.0f / (1.0f + __expf(-logits[e])) : __expf(logits[e] - maximum) / sum;
    weights[e] = weight;
    scores[e] = a.bias != nullptr ? weight + a.bias[e] : weight;
  }
  __syncwarp();
}

// Puts the experts of all but the best groups out of the choice. `copy` is scratch.
FE_DEVICE void keep_best_groups(const MoeGateArgs& a, float* scores, float* copy, float* group_scores) {
  const int experts = static_cast<int>(a.num_experts), groups = static_cast<int>(a.num_groups), size = experts / groups;
  for (int e = lane_id(); e < experts; e += kWarp) copy[e] = scores[e];
  __syncwarp();
  for (int g = 0; g < groups; ++g) {
    float score = take_best(copy, g * size, (g + 1) * size).score;
    if (a.group_by_top2 != 0 && size > 1) score += take_best(copy, g * size, (g + 1) * size).score;
    if (lane_id() == 0) group_scores[g] = score;
  }
  __syncwarp();
  // A group that is taken becomes -inf: what is left then is out.
  for (int i = 0; i < static_cast<int>(a.top_groups); ++i) take_best(group_scores, 0, groups);
  for (int e = lane_id(); e < experts; e += kWarp) {
    if (group_scores[e / size] > -INFINITY) scores[e] = -INFINITY;
  }
  __syncwarp();
}

// One warp per token.
__global__ void __launch_bounds__(kThreads) moe_gate_kernel(const MoeGateArgs a) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id();
  if (token >= a.num_tokens) return;
  float* const scores = dynamic_shared<float>() + warp_id() * (3 * a.num_experts + a.num_groups);
  float* const weights = scores + a.num_experts;
  score_experts(a, a.logits + token * a.num_experts, scores, weights);
  if (a.num_groups > 1) keep_best_groups(a, scores, weights + a.num_experts, weights + 2 * a.num_experts);
  float mine = 0.0f;
  int expert = 0;
  const int top_k = static_cast<int>(a.top_k);
  for (int j = 0; j < top_k; ++j) {
    Choice best = take_best(scores, 0, static_cast<int>(a.num_experts));
    // Only NaN or excluded experts are left: the first is as good as any.
    if (best.expert >= a.num_experts) best.expert = 0;
    if (lane_id() == j) expert = best.expert, mine = weights[best.expert];
  }
  const float sum = a.renormalize != 0 ? warp_reduce(mine, Sum()) : 1.0f;
  if (lane_id() >= top_k) return;
  a.expert_ids[token * top_k + lane_id()] = expert;
  a.weights[token * top_k + lane_id()] = mine / sum * a.scaling;
}

// One block per local expert; every block counts all pairs, and gives its own expert's their rows in order.
__global__ void __launch_bounds__(kThreads) moe_permute_kernel(const MoePermuteArgs a) {
  int* const counts = dynamic_shared<int>();
  FE_SHARED_ARRAY(int, warp_counts, kWarps);
  const int experts = static_cast<int>(a.num_experts), expert = static_cast<int>(blockIdx.x), pairs = static_cast<int>(a.num_pairs);
  const int first_expert = static_cast<int>(a.first_expert), thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  for (int i = thread; i < pairs; i += kThreads) {
    const int e = a.expert_ids[i] - first_expert;
    if (e >= 0 && e < experts) {
      atomicAdd(counts + e, 1);
    } else if (expert == 0) {
      a.row_of_pair[i] = -1;
    }
  }
  __syncthreads();
  int start = 0;
  for (int e = lane_id(); e < expert; e += kWarp) start += static_cast<int>(round_up(counts[e], a.align));
  start = warp_reduce(start, Sum());
  const int end = start + static_cast<int>(round_up(counts[expert], a.align));
  int row = start;
  for (int first = 0; first < pairs; first += kThreads) {
    const int i = first + thread;
    const bool is_mine = i < pairs && a.expert_ids[i] - first_expert == expert;
    const uint32_t lanes = __ballot_sync(kAllLanes, is_mine);
    if (lane_id() == 0) warp_counts[warp_id()] = __popc(lanes);
    __syncthreads();
    int before = __popc(lanes & ((1u << lane_id()) - 1u)), total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp_id()) before += warp_counts[w];
      total += warp_counts[w];
    }
    if (is_mine) {
      a.row_of_pair[i] = row + before;
      a.pair_of_row[row + before] = i;
    }
    row += total;
    __syncthreads();
  }
  // The last expert also fills what nobody uses.
  const int64_t fill_end = expert == experts - 1 ? a.max_rows : end;
  for (int64_t r = row + thread; r < fill_end; r += kThreads) a.pair_of_row[r] = -1;
  if (thread != 0) return;
  a.expert_starts[expert] = start;
  if (expert == experts - 1) a.expert_starts[experts] = end;
}

__global__ void __launch_bounds__(kThreads) moe_gather_kernel(const MoeGatherArgs a) {
  const int64_t row = blockIdx.x, vectors = a.row_size / 8;
  const int pair = a.pair_of_row[row];
  const uint4* const from = static_cast<const uint4*>(a.x) + (pair < 0 ? 0 : pair / a.top_k * vectors);
  uint4* const to = static_cast<uint4*>(a.rows) + row * vectors;
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads) to[i] = pair < 0 ? make_uint4(0, 0, 0, 0) : from[i];
}

template <typename T>
__global__ void __launch_bounds__(kThreads) moe_combine_kernel(const MoeCombineArgs a) {
  const int64_t token = blockIdx.x, at = 8 * (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x);
  if (at >= a.row_size) return;
  float total[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (a.base != nullptr) load8(static_cast<const T*>(a.base) + token * a.row_size + at, total);
#pragma unroll 4
  for (int64_t j = 0; j < a.top_k; ++j) {
    const int row = a.row_of_pair[token * a.top_k + j];
    if (row < 0) continue;
    const float weight = a.weights[token * a.top_k + j];
    float x[8];
    load8(static_cast<const T*>(a.rows) + row * a.row_size + at, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) total[i] += weight * x[i];
  }
  store8(static_cast<T*>(a.out) + token * a.row_size + at, total);
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(moe_gate, MoeGateArgs) {
  using namespace fastengine::cuda;
  const auto& a = *args;
  if (a.num_experts <= 0 || a.num_experts > kMaxExperts || a.top_k <= 0 || a.top_k > kMaxTopK || a.top_k > a.num_experts) return kUnsupported;
  if (a.num_groups < 1 || a.num_experts % a.num_groups != 0 || a.top_groups > a.num_groups) return kUnsupported;
  if (a.num_groups > 1 && a.top_groups * (a.num_experts / a.num_groups) < a.top_k) return kUnsupported;
  if (a.num_tokens == 0) return 0;
  const size_t shared = kWarps * static_cast<size_t>(3 * a.num_experts + a.num_groups) * sizeof(float);
  return launch(moe_gate_kernel, dim3(static_cast<unsigned>(ceil_div(a.num_tokens, kWarps))), dim3(kThreads), shared, static_cast<cudaStream_t>(stream), a);
}

FE_OPERATOR(moe_permute, MoePermuteArgs) {
  using namespace fastengine::cuda;
  const auto& a = *args;
  if (a.num_experts <= 0 || a.num_experts > kMaxExperts || a.align <= 0 || a.num_pairs >= int64_t{1} << 30) return kUnsupported;
  if (a.max_rows < a.num_pairs + a.num_experts * (a.align - 1)) return kUnsupported;
  return launch(moe_permute_kernel, dim3(static_cast<unsigned>(a.num_experts)), dim3(kThreads), a.num_experts * sizeof(int), static_cast<cudaStream_t>(stream), a);
}

FE_OPERATOR(moe_gather, MoeGatherArgs) {
  using namespace fastengine::cuda;
  if (args->row_size % 8 != 0 || (args->dtype != kBFloat16 && args->dtype != kFloat16)) return kUnsupported;
  if (args->num_rows == 0) return 0;
  return launch(moe_gather_kernel, dim3(static_cast<unsigned>(args->num_rows)), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), *args);
}

FE_OPERATOR(moe_combine, MoeCombineArgs) {
  using namespace fastengine::cuda;
  if (args->row_size % 8 != 0 || (args->dtype != kBFloat16 && args->dtype != kFloat16)) return kUnsupported;
  if (args->num_tokens == 0) return 0;
  const auto kernel = args->dtype == kBFloat16 ? moe_combine_kernel<BFloat16> : moe_combine_kernel<Float16>;
  // Tokens along the axis that may have more than 65,535 blocks.
  const dim3 grid(static_cast<unsigned>(args->num_tokens), static_cast<unsigned>(ceil_div(args->row_size, 8 * kThreads)));
  return launch(kernel, grid, dim3(kThreads), 0, static_cast<cudaStream_t>(stream), *args);
}
