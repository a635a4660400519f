// Copies KV blocks between pools: swapping with host memory, copy on write, gathering for a transfer.
//
// Target: 85 % of copy bandwidth between device pools; between device and host, the bus's.
#include "device/platform.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPoolsPerLaunch = 64;
constexpr int kVectors = 4;  // 16-byte accesses in flight per thread

struct Pools {
  const void* sources[kPoolsPerLaunch];
  void* targets[kPoolsPerLaunch];
};

__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(const Pools pools, const int32_t* source_ids, const int32_t* target_ids, int64_t vectors) {
  const int64_t i = blockIdx.x;
  const int64_t from = source_ids != nullptr ? source_ids[i] : i, to = target_ids != nullptr ? target_ids[i] : i;
  const uint4* const source = static_cast<const uint4*>(pools.sources[blockIdx.y]) + from * vectors;
  uint4* const target = static_cast<uint4*>(pools.targets[blockIdx.y]) + to * vectors;
  for (int64_t first = threadIdx.x; first < vectors; first += kThreads * kVectors) {
    uint4 held[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * kThreads < vectors) held[v] = source[first + v * kThreads];
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (first + v * kThreads < vectors) target[first + v * kThreads] = held[v];
    }
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(copy_blocks, BlockCopyArgs) {
  using namespace fastengine::cuda;
  if (args->block_bytes <= 0 || args->block_bytes % 16 != 0) return kUnsupported;
  if (args->num_blocks == 0) return 0;
  for (int64_t first = 0; first < args->num_pools; first += kPoolsPerLaunch) {
    const int64_t count = smaller<int64_t>(kPoolsPerLaunch, args->num_pools - first);
    Pools pools{};
    for (int64_t i = 0; i < count; ++i) {
      pools.sources[i] = args->sources[first + i];
      pools.targets[i] = args->targets[first + i];
    }
    const dim3 grid(static_cast<unsigned>(args->num_blocks), static_cast<unsigned>(count));
    const int status = launch(copy_blocks_kernel, grid, dim3(kThreads), 0, static_cast<cudaStream_t>(stream), pools, args->source_ids, args->target_ids, args->block_bytes / 16);
    if (status != 0) return status;
  }
  return 0;
}
