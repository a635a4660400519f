// RMSNorm (Zhang & Sennrich, 2019), alone or after adding to the residual stream.
//
// Target: 85 % of copy bandwidth. Every value is read once and stays in registers between the sum of
// squares and the output; a row has as many threads as keep each at most kMaxChunks chunks of 8 values.
#include "device/numeric.h"
#include "device/reduce.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kMaxChunks = 4;
constexpr int kBlockThreads = 256;

template <typename T>
FE_DEVICE void load_weight8(const RmsNormArgs& a, int64_t at, float out[8]) {
  if (a.weight_dtype == kFloat32) {
    load8(static_cast<const float*>(a.weight) + at, out);
  } else {
    load8(static_cast<const T*>(a.weight) + at, out);
  }
}

// blockDim.x threads per row, blockDim.y rows per block; several rows only where a row has one warp.
template <typename T, int kChunks>
__global__ void __launch_bounds__(1024) rms_norm_kernel(const RmsNormArgs a) {
  FE_SHARED_ARRAY(float, scratch, kWarp);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool in_range = row < a.num_rows;
  const T* const x = static_cast<const T*>(a.x) + row * a.row_size;
  T* const residual = static_cast<T*>(a.residual) + (a.residual != nullptr ? row * a.row_size : 0);
  float values[kChunks][8];
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t at = 8 * (static_cast<int64_t>(threadIdx.x) + c * static_cast<int64_t>(blockDim.x));
    if (!in_range || at >= a.row_size) continue;
    load8(x + at, values[c]);
    if (a.residual != nullptr) {
      float before[8];
      load8(residual + at, before);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[c][i] += before[i];
      store8(residual + at, values[c]);
      // What is normalised is the sum as stored.
      Eight<T>::unpack(Eight<T>::pack(values[c]), values[c]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += values[c][i] * values[c][i];
  }
  sum = blockDim.x == kWarp ? warp_reduce(sum, Sum()) : block_reduce(sum, Sum(), scratch);
  if (!in_range) return;
  const float scale = rsqrtf(sum / static_cast<float>(a.row_size) + a.epsilon);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t at = 8 * (static_cast<int64_t>(threadIdx.x) + c * static_cast<int64_t>(blockDim.x));
    if (at >= a.row_size) continue;
    float weight[8];
    load_weight8<T>(a, at, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[c][i] *= scale * weight[i];
    store8(static_cast<T*>(a.out) + row * a.row_size + at, values[c]);
  }
}

template <typename T>
int launch_rms_norm(const RmsNormArgs& a, cudaStream_t stream) {
  const int64_t chunks = a.row_size / 8;
  // One warp up to 512 values; beyond, two chunks a thread until the block is full.
  int64_t threads = chunks <= 2 * kWarp ? kWarp : round_up(ceil_div(chunks, 2), kWarp);
  if (threads > 512) threads = round_up(ceil_div(chunks, kMaxChunks), kWarp);
  const unsigned rows = threads == kWarp ? kBlockThreads / kWarp : 1;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.num_rows, rows)));
  const dim3 block(static_cast<unsigned>(threads), rows);
  switch (ceil_div(chunks, threads)) {
    case 1: return launch(rms_norm_kernel<T, 1>, grid, block, 0, stream, a);
    case 2: return launch(rms_norm_kernel<T, 2>, grid, block, 0, stream, a);
    default: return launch(rms_norm_kernel<T, kMaxChunks>, grid, block, 0, stream, a);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(rms_norm, RmsNormArgs) {
  using namespace fastengine::cuda;
  if (args->row_size <= 0 || args->row_size % 8 != 0 || args->row_size > 8 * 1024 * kMaxChunks) return kUnsupported;
  if (args->weight_dtype != kFloat32 && args->weight_dtype != args->dtype) return kUnsupported;
  if (args->num_rows == 0) return 0;
  switch (args->dtype) {
    case kFloat32: return launch_rms_norm<float>(*args, static_cast<cudaStream_t>(stream));
    case kBFloat16: return launch_rms_norm<BFloat16>(*args, static_cast<cudaStream_t>(stream));
    case kFloat16: return launch_rms_norm<Float16>(*args, static_cast<cudaStream_t>(stream));
    default: return kUnsupported;
  }
}
