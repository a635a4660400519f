// What every operator of the Paddle binding uses: checks, element types, outputs, the stream, the launcher's answer.
//
// Shapes, dtypes and places are checked here. The values of indices are not: they are in device memory, and
// looking at them would wait for the device.
#pragma once

#include <vector>

#include "../../cpu/checks.h"
#include "../kernels/launchers.h"

namespace fastengine {
namespace cuda {

using paddle::DataType;
using paddle::Tensor;
// Without the outputs that are inputs changed in place: Paddle adds those itself.
using Outputs = std::vector<Tensor>;

#if defined(PADDLE_WITH_CUDA)
inline void require_on_gpu(const Tensor& x, const char* argument) { require(x.is_gpu(), argument, "expected a tensor on the GPU"); }
inline void* stream_of(const Tensor& x) { return x.stream(); }
#else
// With the kernels on the host shim, for tests under a Paddle without CUDA: tensors lie in host memory.
inline void require_on_gpu(const Tensor&, const char*) {}
inline void* stream_of(const Tensor&) { return nullptr; }
#endif

// Of what the kernels read and write sixteen bytes at a time: a view may begin anywhere.
inline void require_vectors(const Tensor& x, const char* argument) {
  require_on_gpu(x, argument);
  require(reinterpret_cast<uintptr_t>(x.data()) % 16 == 0, argument, "expected memory that begins at a multiple of 16 bytes (a view of another tensor?)");
}

// What the kernels call an element type; -1 for one they do not know.
inline int32_t dtype_code(const Tensor& x) {
  switch (x.dtype()) {
    case DataType::FLOAT32: return kFloat32;
    case DataType::BFLOAT16: return kBFloat16;
    case DataType::FLOAT16: return kFloat16;
    case DataType::INT8: return kInt8;
    // An fp8 cache is kept as bytes.
    case DataType::FLOAT8_E4M3FN:
    case DataType::UINT8: return kFp8E4M3;
    default: return -1;
  }
}

inline bool is_half(int32_t dtype) { return dtype == kBFloat16 || dtype == kFloat16; }

// A float32, bfloat16 or float16 tensor on the GPU.
inline int32_t float_code(const Tensor& x, const char* argument) {
  require_vectors(x, argument);
  const int32_t code = dtype_code(x);
  require(code == kFloat32 || is_half(code), argument, "expected float32, bfloat16 or float16");
  return code;
}
inline int32_t half_code(const Tensor& x, const char* argument) {
  require_vectors(x, argument);
  const int32_t code = dtype_code(x);
  require(is_half(code), argument, "expected bfloat16 or float16");
  return code;
}
inline void require_same_dtype(const Tensor& x, const Tensor& like, const char* argument) {
  require_vectors(x, argument);
  require(x.dtype() == like.dtype(), argument, "expected the dtype of the first tensor");
}

inline const float* device_floats(const Tensor& x, std::initializer_list<int64_t> sizes, const char* argument) {
  require_on_gpu(x, argument);
  return floats(x, sizes, argument);
}
inline const int32_t* device_ints(const Tensor& x, std::initializer_list<int64_t> sizes, const char* argument) {
  require_on_gpu(x, argument);
  return ints(x, sizes, argument);
}
inline const float* optional_floats(const paddle::optional<Tensor>& x, std::initializer_list<int64_t> sizes, const char* argument) {
  return x ? device_floats(*x, sizes, argument) : nullptr;
}

inline Tensor empty(const std::vector<int64_t>& shape, DataType dtype, const Tensor& like) { return paddle::empty(shape, dtype, like.place()); }

// What the launcher answered, as an exception if it is not 0.
inline void require_launched(int status, const char* operation) {
  if (__builtin_expect(status == 0, 1)) return;
  require(status != kUnsupported, operation, "no CUDA kernel covers these shapes and dtypes");
  PADDLE_THROW(common::errors::External("fastengine %s: CUDA error %d", operation, status));
}

}  // namespace cuda
}  // namespace fastengine

// Runs a launcher on the stream of `tensor`.
#define FE_RUN(name, arguments, tensor) ::fastengine::cuda::require_launched(fe_##name(&(arguments), ::fastengine::cuda::stream_of(tensor)), #name)
