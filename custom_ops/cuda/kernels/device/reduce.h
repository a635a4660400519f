// Sums and maxima over a warp and a block. Every result is the same for every thread and every run.
#pragma once

#include "platform.h"

namespace fastengine {
namespace cuda {

struct Sum {
  template <typename T>
  FE_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};
struct Maximum {
  template <typename T>
  FE_DEVICE T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

// Over the kLanes neighbours of a lane (a power of two); all of them get the result.
template <int kLanes = kWarp, typename T, typename Op>
FE_DEVICE T warp_reduce(T value, Op op) {
#pragma unroll
  for (int bits = kLanes / 2; bits > 0; bits /= 2) value = op(value, __shfl_xor_sync(kAllLanes, value, bits));
  return value;
}

// Over the block; `scratch` holds 32 values of T in shared memory and may be reused after the next barrier.
template <typename T, typename Op>
FE_DEVICE T block_reduce(T value, Op op, T* scratch) {
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  value = warp_reduce(value, op);
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  T total = scratch[0];
  for (int i = 1; i < num_warps; ++i) total = op(total, scratch[i]);
  return total;
}

}  // namespace cuda
}  // namespace fastengine
