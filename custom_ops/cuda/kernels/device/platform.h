// One include for device code: CUDA under nvcc, the host shim elsewhere. No kernel tests for either.
//
// What differs is here and in tensor_core.h: launching, shared memory, and asynchronous copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#define FE_ON_GPU 1
#else
#include "../../host_shim/cuda_language.h"
#define FE_ON_GPU 0
#endif

#define FE_DEVICE __device__ __forceinline__
#define FE_HOST_DEVICE __host__ __device__ __forceinline__

namespace fastengine {
namespace cuda {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

#if FE_ON_GPU

template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  constexpr size_t kDefaultShared = 48 * 1024;
  if (shared_bytes > kDefaultShared) {
    const cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  kernel<<<grid, block, shared_bytes, stream>>>(args...);
  return static_cast<int>(cudaGetLastError());
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) return 0;
  return value;
}
inline int num_multiprocessors() {
  static const int count = device_attribute(cudaDevAttrMultiProcessorCount);
  return count;
}
// Shared memory of one multiprocessor, all its blocks together.
inline int multiprocessor_shared_bytes() {
  static const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return bytes;
}

template <typename T = unsigned char>
FE_DEVICE T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char fe_dynamic_shared[];
  return reinterpret_cast<T*>(fe_dynamic_shared);
}

#define FE_SHARED_ARRAY(type, name, count) __shared__ type name[count]

// Sixteen bytes from global to shared memory, zeros instead where not `valid`.
FE_DEVICE void copy_async_16(void* shared, const void* global, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}
FE_DEVICE void copy_async_4(void* shared, const void* global, bool valid) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}
FE_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most kOpen of this thread's committed groups are under way.
template <int kOpen>
FE_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kOpen) : "memory");
}

FE_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

#else

template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, const Args&... args) {
  return shim::run_grid({grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, reinterpret_cast<const void*>(kernel), [&] { kernel(args...); });
}

// Few, so that blocks take several pieces of work each.
inline int num_multiprocessors() { return 2; }
inline int multiprocessor_shared_bytes() { return shim::multiprocessor_shared_bytes; }

template <typename T = unsigned char>
T* dynamic_shared() {
  return static_cast<T*>(shim::dynamic_shared());
}

#define FE_SHARED_ARRAY(type, name, count) \
  static const char name##_key = 0;        \
  type* const name = static_cast<type*>(::fastengine::shim::static_shared(&name##_key, sizeof(type) * (count)))

inline void copy_async_16(void* shared, const void* global, bool valid) {
  shim::current->open_copies.push_back({shared, global, 16, valid ? size_t{16} : size_t{0}});
}
inline void copy_async_4(void* shared, const void* global, bool valid) { shim::current->open_copies.push_back({shared, global, 4, valid ? size_t{4} : size_t{0}}); }
inline void copy_async_commit() { shim::commit_copies(); }
template <int kOpen>
void copy_async_wait() {
  shim::wait_copies(kOpen);
}

inline float fast_exp2(float x) { return std::exp2(x); }

#endif

FE_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
FE_DEVICE int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }

FE_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FE_HOST_DEVICE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
template <typename T>
FE_HOST_DEVICE T smaller(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
FE_HOST_DEVICE T larger(T a, T b) {
  return a > b ? a : b;
}

}  // namespace cuda
}  // namespace fastengine
