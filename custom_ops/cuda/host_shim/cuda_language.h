// The part of CUDA C++ that the kernels use, for a plain C++ compiler. Included in place of the
// toolkit's headers; see fibers.h for what runs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = void*;

#define threadIdx (::fastengine::shim::current->index)
#define blockIdx (::fastengine::shim::block_index)
#define blockDim (::fastengine::shim::block_dim)
#define gridDim (::fastengine::shim::grid_dim)

namespace fastengine {
namespace shim {

inline unsigned lane() { return current->linear % 32; }

template <typename T>
struct Shuffle : Collective {
  T value;
  unsigned source;  // lane to read from; 32: keep one's own
  T result;
};

template <typename T>
void complete_shuffle(Collective* const lanes[32]) {
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] == nullptr) continue;
    auto* const mine = static_cast<Shuffle<T>*>(lanes[i]);
    const unsigned source = mine->source == 32 ? i : mine->source;
    if (lanes[source] == nullptr) fail(std::string(mine->name) + ": lane " + std::to_string(i) + " reads a lane outside the mask", mine->site);
    mine->result = static_cast<Shuffle<T>*>(lanes[source])->value;
  }
}

template <typename T>
T shuffle(const char* name, uint32_t mask, T value, unsigned source, Site site) {
  Shuffle<T> mine{{name, mask, site, complete_shuffle<T>}, value, source, T{}};
  warp_operation(&mine);
  return mine.result;
}

struct Vote : Collective {
  bool value;
  uint32_t result;
};

inline void complete_vote(Collective* const lanes[32]) {
  uint32_t bits = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] != nullptr && static_cast<Vote*>(lanes[i])->value) bits |= 1u << i;
  }
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] != nullptr) static_cast<Vote*>(lanes[i])->result = bits;
  }
}

inline uint32_t vote(const char* name, uint32_t mask, bool value, Site site) {
  Vote mine{{name, mask, site, complete_vote}, value, 0};
  warp_operation(&mine);
  return mine.result;
}

}  // namespace shim
}  // namespace fastengine

#define FE_SHIM_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(FE_SHIM_SITE) {
  if (!fastengine::shim::is_skipped({file, line})) fastengine::shim::block_barrier({file, line});
}
inline void __syncwarp(uint32_t mask = 0xffffffffu, FE_SHIM_SITE) {
  if (!fastengine::shim::is_skipped({file, line})) fastengine::shim::vote("__syncwarp", mask, false, {file, line});
}
inline uint32_t __ballot_sync(uint32_t mask, bool value, FE_SHIM_SITE) { return fastengine::shim::vote("__ballot_sync", mask, value, {file, line}); }
inline bool __any_sync(uint32_t mask, bool value, FE_SHIM_SITE) { return fastengine::shim::vote("__any_sync", mask, value, {file, line}) != 0; }
inline bool __all_sync(uint32_t mask, bool value, FE_SHIM_SITE) { return fastengine::shim::vote("__all_sync", mask, !value, {file, line}) == 0; }

template <typename T>
T __shfl_sync(uint32_t mask, T value, int source, FE_SHIM_SITE) {
  return fastengine::shim::shuffle("__shfl_sync", mask, value, static_cast<unsigned>(source) % 32, {file, line});
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, FE_SHIM_SITE) {
  return fastengine::shim::shuffle("__shfl_xor_sync", mask, value, fastengine::shim::lane() ^ static_cast<unsigned>(bits), {file, line});
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned by, FE_SHIM_SITE) {
  const unsigned lane = fastengine::shim::lane();
  return fastengine::shim::shuffle("__shfl_up_sync", mask, value, lane >= by ? lane - by : 32, {file, line});
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned by, FE_SHIM_SITE) {
  const unsigned lane = fastengine::shim::lane();
  return fastengine::shim::shuffle("__shfl_down_sync", mask, value, lane + by < 32 ? lane + by : 32, {file, line});
}

template <typename T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <typename T>
T atomicMax(T* address, T value) {
  const T before = *address;
  if (value > before) *address = value;
  return before;
}
template <typename T>
T atomicMin(T* address, T value) {
  const T before = *address;
  if (value < before) *address = value;
  return before;
}

template <typename T>
T atomicOr(T* address, T value) {
  const T before = *address;
  *address = before | value;
  return before;
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
inline void __threadfence() {}

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline float __expf(float value) { return std::exp(value); }
inline float __logf(float value) { return std::log(value); }
inline float __fdividef(float a, float b) { return a / b; }
using std::ceil;
using std::log;
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
