// Cheap checks of the operators' arguments. A failure names the argument and becomes a ValueError.
#pragma once

#include <string>
#include <vector>

#include "paddle/extension.h"

namespace fastengine {

// What the Python side looks for in the message, to cut off Paddle's own decoration.
inline void require(bool holds, const char* argument, const std::string& expected) {
  if (__builtin_expect(holds, 1)) return;
  PADDLE_THROW(common::errors::InvalidArgument("[fastengine] %s: %s [/fastengine]", argument, expected));
}

inline std::string shape_text(const paddle::Tensor& x) {
  std::string text = "[";
  for (const int64_t n : x.shape()) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

inline const char* dtype_text(paddle::DataType dtype) {
  switch (dtype) {
    case paddle::DataType::FLOAT32: return "float32";
    case paddle::DataType::BFLOAT16: return "bfloat16";
    case paddle::DataType::INT32: return "int32";
    case paddle::DataType::INT64: return "int64";
    default: return "another dtype";
  }
}

inline void require_dtype(const paddle::Tensor& x, paddle::DataType dtype, const char* argument) {
  if (__builtin_expect(x.dtype() == dtype, 1)) return;
  require(false, argument, std::string("expected ") + dtype_text(dtype) + ", got " + dtype_text(x.dtype()));
}

inline int64_t dim(const paddle::Tensor& x, int axis) { return x.dims()[axis]; }
inline int rank(const paddle::Tensor& x) { return x.dims().size(); }

// `sizes` holds the wanted extent of every axis; -1 takes any.
inline void require_shape(const paddle::Tensor& x, std::initializer_list<int64_t> sizes, const char* argument) {
  const auto& dims = x.dims();
  bool same = dims.size() == static_cast<int>(sizes.size());
  int axis = 0;
  for (const int64_t size : sizes) {
    same = same && (size < 0 || dims[axis] == size);
    ++axis;
  }
  if (__builtin_expect(same, 1)) return;
  std::string wanted = "[";
  for (const int64_t size : sizes) wanted += (wanted.size() > 1 ? ", " : "") + (size < 0 ? std::string("*") : std::to_string(size));
  require(false, argument, "expected shape " + wanted + "], got " + shape_text(x));
}

inline const float* floats(const paddle::Tensor& x, std::initializer_list<int64_t> sizes, const char* argument) {
  require_dtype(x, paddle::DataType::FLOAT32, argument);
  require_shape(x, sizes, argument);
  return x.data<float>();
}

inline const int32_t* ints(const paddle::Tensor& x, std::initializer_list<int64_t> sizes, const char* argument) {
  require_dtype(x, paddle::DataType::INT32, argument);
  require_shape(x, sizes, argument);
  return x.data<int32_t>();
}

// Every value within [low, high).
inline void require_range(const int32_t* values, int64_t n, int64_t low, int64_t high, const char* argument) {
  for (int64_t i = 0; i < n; ++i) {
    if (__builtin_expect(values[i] >= low && values[i] < high, 1)) continue;
    const std::string range = "[" + std::to_string(low) + ", " + std::to_string(high) + ")";
    require(false, argument, "value " + std::to_string(values[i]) + " at " + std::to_string(i) + " is outside " + range);
  }
}

// Starts of a packed array: the first is 0, none is below the one before, the last is `total`.
inline void require_starts(const int32_t* starts, int64_t n, int64_t total, const char* argument) {
  require(starts[0] == 0, argument, "must start at 0");
  for (int64_t i = 0; i < n; ++i) require(starts[i] <= starts[i + 1], argument, "must not decrease");
  require(starts[n] == total, argument, "must end at " + std::to_string(total));
}

}  // namespace fastengine
