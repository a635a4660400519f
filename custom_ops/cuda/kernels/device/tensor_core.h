// Tensor-core instructions of sm_80 and later: one matrix product of a warp and the loads of its operands.
//
// What each lane holds is in host_shim/fragments.h, which computes the same on the CPU; a test checks both
// that table and, on a GPU, the instructions against it.
#pragma once

#include "numeric.h"

#if !FE_ON_GPU
#include "../../host_shim/fragments.h"
#endif

namespace fastengine {
namespace cuda {

// d[16 x 8] += a[16 x 16] * b[16 x 8], 16-bit floats T, float32 sums.
template <typename T>
FE_DEVICE void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1);

#if FE_ON_GPU

template <>
FE_DEVICE void mma_16x8x16<BFloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
FE_DEVICE void mma_16x8x16<Float16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit values from shared memory: lane l gives the address of row l % 8 of matrix l / 8.
FE_DEVICE void load_matrices(uint32_t (&r)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// The same, each matrix transposed.
FE_DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

#else

template <>
inline void mma_16x8x16<BFloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
  shim::multiply(d, a, b0, b1, [](uint32_t pair) { return unpack2<BFloat16>(pair); });
}
template <>
inline void mma_16x8x16<Float16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t b0, const uint32_t b1) {
  shim::multiply(d, a, b0, b1, [](uint32_t pair) { return unpack2<Float16>(pair); });
}
inline void load_matrices(uint32_t (&r)[4], const void* row) { shim::load_matrices(r, row, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) { shim::load_matrices(r, row, true); }

#endif

}  // namespace cuda
}  // namespace fastengine
