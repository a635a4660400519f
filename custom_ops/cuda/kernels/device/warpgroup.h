// Matrix products of sm_90 that a warpgroup (four warps) starts and waits for: wgmma, and what orders memory for it.
//
// The right operand, and the left one unless it is in registers, lie in shared memory in panels of 64 16-bit values: a
// row of 128 bytes, its eight chunks of 16 bytes exchanged by the row's number (the 128-byte swizzle), rows one after the
// other. A panel begins at a multiple of 1,024 bytes. host_shim/warpgroup.h computes the same on the CPU, from the PTX
// manual; a probe checks that table, and the hardware against it where there is one.
#pragma once

#include "numeric.h"

#if !FE_ON_GPU
#include "../../host_shim/warpgroup.h"
#endif

// Whether this compilation knows the instructions. Where not (a library without sm_90), kernels that use them are empty:
// has_warpgroup_products() keeps everybody from them.
#if !FE_ON_GPU || !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FE_WARPGROUP_PRODUCTS 1
#else
#define FE_WARPGROUP_PRODUCTS 0
#endif

namespace fastengine {
namespace cuda {

constexpr int kPanelColumns = 64;    // 16-bit values
constexpr int kPanelRow = 128;       // bytes
constexpr int kPanelAlignment = 1024;
constexpr int kNoLeading = 16;       // bytes: what the manual assumes where there is none

// Where chunk `chunk` (of 16 bytes) of a row of a panel lies, in bytes from the panel's begin.
FE_HOST_DEVICE int swizzled(int row, int chunk) { return row * kPanelRow + ((chunk ^ (row & 7)) << 4); }

// A matrix operand in shared memory (PTX manual, "Matrix Descriptor"). `stride`: bytes between neighbouring groups of eight
// rows of a panel; `leading`: bytes between panels, for operands that go over several along their rows, else kNoLeading.
FE_DEVICE uint64_t matrix_operand(uint32_t address, int leading, int stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>(bytes >> 4 & 0x3fffu); };
  return kSwizzle128 | field(static_cast<uint32_t>(stride)) << 32 | field(static_cast<uint32_t>(leading)) << 16 | field(address);
}
// The operand `bytes` further on.
FE_DEVICE uint64_t moved(uint64_t operand, int bytes) { return operand + static_cast<uint64_t>(bytes >> 4); }

#if FE_ON_GPU

FE_DEVICE uint32_t shared_address(const void* shared) { return static_cast<uint32_t>(__cvta_generic_to_shared(shared)); }

// Only the host asks: the kernels exist for this one architecture.
inline bool has_warpgroup_products() {
  static const bool has = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 && device_attribute(cudaDevAttrComputeCapabilityMinor) == 0;
  return has;
}

// After copies into shared memory, by the thread that made them and before the barrier: products read it another way.
FE_DEVICE void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
// Before the first product, and whenever registers that products read or add to were touched.
FE_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
FE_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Waits for all. The compiler must not touch `d`, what they add to, before, nor give the registers of a left operand away.
template <int kCount>
FE_DEVICE void products_wait(float (&d)[kCount][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;\n" ::: "memory");
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
  }
}
template <int kCount, int kLefts>
FE_DEVICE void products_wait(float (&d)[kCount][4], uint32_t (&left)[kLefts][4]) {
  products_wait(d);
#pragma unroll
  for (int i = 0; i < kLefts; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(left[i][j])::"memory");
  }
}

// The accumulators as operands, and their numbers.
#define FE_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FE_D16(i) FE_D4(i), FE_D4(i + 1), FE_D4(i + 2), FE_D4(i + 3)
#define FE_DS32 FE_D16(0), FE_D16(4)
#define FE_DS64 FE_DS32, FE_D16(8), FE_D16(12)

#define FE_LIST32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define FE_LIST64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "

// d[64 x N] (+)= left[64 x 16] * right[16 x N] for N = 64 and 128: of each warp's 16 rows, a lane has what it has of mma's sums.
// `adds` 0: overwrites d. kAcross: a row of `right` in memory is one of the 16, else one of the N.
template <typename T, bool kAcross>
struct WarpgroupProduct;

// kind: "bf16" or "f16". The predicate p is whether to add.
#define FE_DEFINE_PRODUCT(Type, kind)                                                                                                 \
template <bool kAcross>                                                                                                               \
struct WarpgroupProduct<Type, kAcross> {                                                                                              \
  static FE_DEVICE void run(float (&d)[8][4], uint64_t left, uint64_t right, int adds) {                                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind " " FE_LIST32  \
                 "%32, %33, p, 1, 1, 0, %35;\n}\n"                                                                                    \
                 : FE_DS32                                                                                                            \
                 : "l"(left), "l"(right), "r"(adds), "n"(kAcross ? 1 : 0));                                                           \
  }                                                                                                                                   \
  static FE_DEVICE void run(float (&d)[8][4], const uint32_t (&left)[4], uint64_t right, int adds) {                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind " " FE_LIST32  \
                 "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                                                      \
                 : FE_DS32                                                                                                            \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(adds), "n"(kAcross ? 1 : 0));              \
  }                                                                                                                                   \
  static FE_DEVICE void run(float (&d)[16][4], uint64_t left, uint64_t right, int adds) {                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind " " FE_LIST64 \
                 "%64, %65, p, 1, 1, 0, %67;\n}\n"                                                                                    \
                 : FE_DS64                                                                                                            \
                 : "l"(left), "l"(right), "r"(adds), "n"(kAcross ? 1 : 0));                                                           \
  }                                                                                                                                   \
  static FE_DEVICE void run(float (&d)[16][4], const uint32_t (&left)[4], uint64_t right, int adds) {                                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind " " FE_LIST64 \
                 "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                                                      \
                 : FE_DS64                                                                                                            \
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(adds), "n"(kAcross ? 1 : 0));              \
  }                                                                                                                                   \
};
FE_DEFINE_PRODUCT(BFloat16, "bf16")
FE_DEFINE_PRODUCT(Float16, "f16")
#undef FE_DEFINE_PRODUCT
#undef FE_D4
#undef FE_D16
#undef FE_DS32
#undef FE_DS64
#undef FE_LIST32
#undef FE_LIST64

#else

inline uint32_t shared_address(const void* shared) { return shim::shared_address(shared); }
// As the emulated card is an sm_90 by its memory, or not.
inline bool has_warpgroup_products() { return shim::multiprocessor_shared_bytes == 228 * 1024; }
inline void publish_to_products() { shim::publish_to_products(); }
inline void products_begin() { shim::products_begin(); }
inline void products_commit() { shim::products_commit(); }
template <int kCount>
void products_wait(float (&)[kCount][4]) {
  shim::products_wait();
}
template <int kCount, int kLefts>
void products_wait(float (&)[kCount][4], uint32_t (&)[kLefts][4]) {
  shim::products_wait();
}

template <typename T, bool kAcross>
struct WarpgroupProduct {
  template <int kCount>
  static void run(float (&d)[kCount][4], uint64_t left, uint64_t right, int adds) {
    shim::start_product({&d[0][0], 8 * kCount, nullptr, left, right, kAcross, adds != 0, unpack2<T>});
  }
  template <int kCount>
  static void run(float (&d)[kCount][4], const uint32_t (&left)[4], uint64_t right, int adds) {
    shim::start_product({&d[0][0], 8 * kCount, left, 0, right, kAcross, adds != 0, unpack2<T>});
  }
};

#endif

}  // namespace cuda
}  // namespace fastengine
