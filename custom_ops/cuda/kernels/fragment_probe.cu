// The tensor-core instructions on their own, for tests.
#include "device/tensor_core.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

template <typename T>
__global__ void fragment_probe_kernel(const FragmentProbeArgs a) {
  const int lane = lane_id();
  uint16_t* const rows = dynamic_shared<uint16_t>();
  for (int i = 0; i < 8; ++i) rows[lane * 8 + i] = static_cast<const uint16_t*>(a.matrices)[lane * 8 + i];
  __syncwarp();
  uint32_t registers[4], operand[4];
  if (a.transposed != 0) {
    load_matrices_transposed(registers, rows + lane * 8);
  } else {
    load_matrices(registers, rows + lane * 8);
  }
  float d[4];
  for (int i = 0; i < 4; ++i) {
    a.loaded[lane * 4 + i] = registers[i];
    operand[i] = a.a[lane * 4 + i];
    d[i] = a.d[lane * 4 + i];
  }
  mma_16x8x16<T>(d, operand, a.b[lane * 2], a.b[lane * 2 + 1]);
  for (int i = 0; i < 4; ++i) a.d[lane * 4 + i] = d[i];
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(fragment_probe, FragmentProbeArgs) {
  using namespace fastengine::cuda;
  const auto kernel = args->dtype == kBFloat16 ? fragment_probe_kernel<BFloat16> : fragment_probe_kernel<Float16>;
  return launch(kernel, dim3(1), dim3(kWarp), 512, static_cast<cudaStream_t>(stream), *args);
}
