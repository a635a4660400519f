// Kernels with and without mistakes, to test the host shim with.
#include "../../../custom_ops/cuda/kernels/device/platform.h"
#include "../../../custom_ops/cuda/kernels/device/reduce.h"
#include "../../../custom_ops/cuda/kernels/device/warpgroup.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 64;

// Thread i passes i to its neighbour through shared memory, with or without the barrier between.
template <bool kBarrier>
__global__ void pass_to_neighbour(int* out) {
  FE_SHARED_ARRAY(int, held, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  held[i] = i;
  if (kBarrier) __syncthreads();
  out[i] = held[(i + 1) % kThreads];
}

// The same within warps.
template <bool kBarrier>
__global__ void pass_within_warp(int* out) {
  int* const held = dynamic_shared<int>();
  const int i = static_cast<int>(threadIdx.x);
  held[i] = i;
  if (kBarrier) __syncwarp();
  out[i] = held[i / kWarp * kWarp + (i + 1) % kWarp];
}

// Rounds of a sum that reuse one buffer: two barriers a round are needed, one passes only by luck.
template <bool kSecondBarrier>
__global__ void repeated_rotation(int* out) {
  FE_SHARED_ARRAY(int, held, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  int value = i;
  for (int round = 0; round < 5; ++round) {
    held[i] = value;
    __syncthreads();
    value = held[(i + 1) % kThreads];
    if (kSecondBarrier) __syncthreads();
  }
  out[i] = value;
}

__global__ void barrier_for_half(int* out) {
  if (threadIdx.x < kThreads / 2) __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void two_different_barriers(int* out) {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

__global__ void shuffle_without_everybody(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[i] = i;
  if (i % kWarp != 5) out[i] = __shfl_xor_sync(kAllLanes, i, 1);
}

__global__ void shuffle_from_outside_the_mask(int* out) {
  const int i = static_cast<int>(threadIdx.x), lane = i % kWarp;
  out[i] = i;
  if (lane < 8) out[i] = __shfl_sync(0xffu, i, 9);
}

__global__ void shuffle_while_others_are_at_the_barrier(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  if (i % kWarp < 16) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  out[i] = i;
}

// Two groups of a warp shuffle on their own, at different speeds.
__global__ void shuffles_of_separate_groups(int* out) {
  const int i = static_cast<int>(threadIdx.x), lane = i % kWarp;
  int value = i;
  if (lane < 8) {
    for (int round = 0; round < 3; ++round) value = __shfl_sync(0xffu, value, (lane + 1) % 8);
  } else {
    value = __shfl_sync(0xffffff00u, value, 8 + (lane - 8 + 1) % 24);
  }
  out[i] = value;
}

__global__ void block_sum(int* out) {
  FE_SHARED_ARRAY(int, scratch, kWarp);
  out[threadIdx.x] = block_reduce(static_cast<int>(threadIdx.x), Sum(), scratch);
}

template <bool kWait>
__global__ void copy_through_shared(const int* in, int* out) {
  int* const held = dynamic_shared<int>();
  const int i = static_cast<int>(threadIdx.x);
  if (i < kThreads / 4) copy_async_16(held + 4 * i, in + 4 * i, i != 1);
  copy_async_commit();
  if (kWait) {
    copy_async_wait<0>();
    __syncthreads();
    out[i] = held[kThreads - 1 - i];
  } else {
    __syncthreads();
    out[i] = held[kThreads - 1 - i];
    copy_async_wait<0>();
  }
}

__global__ void ends_with_a_copy_under_way(const int* in) {
  copy_async_16(dynamic_shared<int>() + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
  copy_async_commit();
}

__global__ void write_block_number(int* out) { out[blockIdx.z * 6 + blockIdx.y * 3 + blockIdx.x] = static_cast<int>(atomicAdd(out + 12, 1) >= 0); }

// One product of a warpgroup, all operands ones: every sum is 16. With one mistake, or none.
enum Mistake { kNone, kNoPublish, kNoBegin, kNoCommit, kNoWait, kEarlyRead, kEarlyOverwrite, kRegistersReused, kBesideThePanel };

__global__ void matrix_product(const uint4* ones, float* out, int mistake) {
  unsigned char* shared = dynamic_shared();
  shared += 0u - shared_address(shared) & (kPanelAlignment - 1u);
  const int i = static_cast<int>(threadIdx.x);
  for (int chunk = i; chunk < 64 * 8; chunk += kWarp * 4) copy_async_16(shared + 16 * chunk, ones, true);
  copy_async_commit();
  copy_async_wait<0>();
  if (mistake != kNoPublish) publish_to_products();
  __syncthreads();
  float d[8][4] = {};
  uint32_t left[4];
  for (uint32_t& pair : left) pair = 0x3f803f80u;
  if (mistake != kNoBegin) products_begin();
  const uint32_t begin = shared_address(shared) + (mistake == kBesideThePanel ? 64 * kPanelRow : 0);
  WarpgroupProduct<BFloat16, false>::run(d, left, matrix_operand(begin, 0, 8 * kPanelRow), 1);
  if (mistake != kNoCommit) products_commit();
  if (mistake == kEarlyRead) out[i] = d[0][1];
  if (mistake == kEarlyOverwrite) reinterpret_cast<float4*>(shared)[i] = make_float4(0, 0, 0, 0);
  if (mistake == kRegistersReused) left[0] = 0;
  if (mistake != kNoWait) products_wait(d);
  if (mistake != kEarlyRead) out[i] = d[0][1];
}

// As much static shared memory as kBytes says.
template <int kBytes>
__global__ void takes_shared(int* out) {
  FE_SHARED_ARRAY(unsigned char, fixed, kBytes);
  fixed[threadIdx.x] = 1;
  out[threadIdx.x] = fixed[threadIdx.x];
}

__global__ void uninitialised_shared(int* out) {
  FE_SHARED_ARRAY(int, fixed, kThreads);
  out[threadIdx.x] = fixed[threadIdx.x] & dynamic_shared<int>()[threadIdx.x];
  fixed[threadIdx.x] = dynamic_shared<int>()[threadIdx.x] = 3;
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

#define FE_TEST_KERNEL(name, kernel) \
  extern "C" int fe_test_##name(int* out) { return launch(kernel, dim3(1), dim3(kThreads), 4 * kThreads, nullptr, out); }

using namespace fastengine::cuda;
FE_TEST_KERNEL(pass_with_barrier, pass_to_neighbour<true>)
FE_TEST_KERNEL(pass_without_barrier, pass_to_neighbour<false>)
FE_TEST_KERNEL(pass_within_warp_with_barrier, pass_within_warp<true>)
FE_TEST_KERNEL(pass_within_warp_without_barrier, pass_within_warp<false>)
FE_TEST_KERNEL(rotation_with_both_barriers, repeated_rotation<true>)
FE_TEST_KERNEL(rotation_with_one_barrier, repeated_rotation<false>)
FE_TEST_KERNEL(barrier_for_half, barrier_for_half)
FE_TEST_KERNEL(two_different_barriers, two_different_barriers)
FE_TEST_KERNEL(shuffle_without_everybody, shuffle_without_everybody)
FE_TEST_KERNEL(shuffle_from_outside_the_mask, shuffle_from_outside_the_mask)
FE_TEST_KERNEL(shuffle_while_others_are_at_the_barrier, shuffle_while_others_are_at_the_barrier)
FE_TEST_KERNEL(shuffles_of_separate_groups, shuffles_of_separate_groups)
FE_TEST_KERNEL(block_sum, block_sum)
FE_TEST_KERNEL(uninitialised_shared, uninitialised_shared)

extern "C" {
int fe_test_copy(const int* in, int* out, int waits) {
  return waits != 0 ? launch(copy_through_shared<true>, dim3(1), dim3(kThreads), 4 * kThreads, nullptr, in, out)
                    : launch(copy_through_shared<false>, dim3(1), dim3(kThreads), 4 * kThreads, nullptr, in, out);
}
int fe_test_copy_under_way(const int* in) { return launch(ends_with_a_copy_under_way, dim3(1), dim3(16), 4 * kThreads, nullptr, in); }
int fe_test_grid(int* out) { return launch(write_block_number, dim3(3, 2, 2), dim3(1), 0, nullptr, out); }
int fe_test_blocks(int* out, unsigned x, unsigned y, unsigned z) { return launch(write_block_number, dim3(x, y, z), dim3(1), 0, nullptr, out); }
int fe_test_shared(int* out, uint64_t dynamic, int much) {
  return much != 0 ? launch(takes_shared<48 * 1024 + 16>, dim3(1), dim3(kThreads), dynamic, nullptr, out)
                   : launch(takes_shared<1024>, dim3(1), dim3(kThreads), dynamic, nullptr, out);
}
int fe_test_product(const void* ones, float* out, int mistake) {
  return launch(matrix_product, dim3(1), dim3(4 * kWarp), 64 * kPanelRow + kPanelAlignment, nullptr, static_cast<const uint4*>(ones), out, mistake);
}
int fe_test_no_threads(int* out) { return launch(write_block_number, dim3(1), dim3(0), 0, nullptr, out); }
}
