// One matrix product of a warpgroup on its own, for tests: where the operands lie is up to the caller.
#include "device/warpgroup.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 128;

template <typename T, bool kInRegisters, bool kAcross>
__global__ void __launch_bounds__(kThreads) product_probe_kernel(const ProductProbeArgs a) {
#if FE_WARPGROUP_PRODUCTS
  unsigned char* shared = dynamic_shared();
  shared += 0u - shared_address(shared) & (kPanelAlignment - 1u);
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t i = thread * 16; i < a.image_bytes; i += kThreads * 16) copy_async_16(shared + i, static_cast<const unsigned char*>(a.image) + i, true);
  copy_async_commit();
  copy_async_wait<0>();
  publish_to_products();
  __syncthreads();
  float d[kColumns / 8][4];
  uint32_t left[1][4];
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) d[i][j] = a.d[(thread * (kColumns / 8) + i) * 4 + j];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) left[0][j] = a.left[thread * 4 + j];
  const uint64_t right = matrix_operand(shared_address(shared) + static_cast<uint32_t>(a.right_begin), a.right_leading, a.right_stride);
  products_begin();
  if constexpr (kInRegisters) {
    WarpgroupProduct<T, kAcross>::run(d, left[0], right, a.adds);
  } else {
    WarpgroupProduct<T, kAcross>::run(d, matrix_operand(shared_address(shared) + static_cast<uint32_t>(a.left_begin), kNoLeading, a.left_stride), right, a.adds);
  }
  products_commit();
  products_wait(d, left);
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) a.d[(thread * (kColumns / 8) + i) * 4 + j] = d[i][j];
  }
#endif
}

template <typename T>
int launch_probe(const ProductProbeArgs& a, cudaStream_t stream) {
  const auto kernel = a.in_registers != 0 ? (a.across != 0 ? product_probe_kernel<T, true, true> : product_probe_kernel<T, true, false>)
                                          : (a.across != 0 ? product_probe_kernel<T, false, true> : product_probe_kernel<T, false, false>);
  return launch(kernel, dim3(1), dim3(kThreads), static_cast<size_t>(a.image_bytes) + kPanelAlignment, stream, a);
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(product_probe, ProductProbeArgs) {
  using namespace fastengine::cuda;
  if (!has_warpgroup_products() || args->image_bytes % 16 != 0) return kUnsupported;
  return args->dtype == kBFloat16 ? launch_probe<BFloat16>(*args, static_cast<cudaStream_t>(stream)) : launch_probe<Float16>(*args, static_cast<cudaStream_t>(stream));
}
