// RMSNorm and SiLU-mul: each row is one thread's, in one fixed order.
#include "launchers.h"
#include "parallel.h"

namespace fastengine {
namespace FE_ISA {
namespace {

// Adds x to the row when x is given, and returns the row's sum of squares.
float accumulate_row(const float* x, float* residual, int64_t n) {
  const float* source = residual != nullptr ? residual : x;
  Vec sums[4] = {vzero(), vzero(), vzero(), vzero()};
  const auto load = [&](int64_t i, int64_t lanes) {
    Vec value = vload_n(source + i, lanes);
    if (residual != nullptr) {
      value = vadd(value, vload_n(x + i, lanes));
      vstore_n(residual + i, value, lanes);
    }
    return value;
  };
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int u = 0; u < 4; ++u) {
      const Vec value = load(i + u * kLanes, kLanes);
      sums[u] = vfma(value, value, sums[u]);
    }
  }
  for (; i < n; i += kLanes) {
    const Vec value = load(i, min_i(kLanes, n - i));
    sums[0] = vfma(value, value, sums[0]);
  }
  return vsum(vadd(vadd(sums[0], sums[1]), vadd(sums[2], sums[3])));
}

Vec silu(Vec gate) { return vdiv(gate, vadd(vset(1.0f), vexp(vsub(vzero(), gate)))); }

}  // namespace

void rms_norm(const float* x, float* residual, const float* weight, float epsilon, float* out, int64_t num_rows, int64_t row_size) {
  parallel_ranges(num_rows, 4 * row_size, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const added = residual != nullptr ? residual + r * row_size : nullptr;
      const float mean = accumulate_row(x + r * row_size, added, row_size) / static_cast<float>(row_size);
      const Vec scale = vset(1.0f / __builtin_sqrtf(mean + epsilon));
      const float* const source = added != nullptr ? added : x + r * row_size;
      float* const target = out + r * row_size;
      for (int64_t i = 0; i < row_size; i += kLanes) {
        const int64_t lanes = min_i(kLanes, row_size - i);
        vstore_n(target + i, vmul(vmul(vload_n(source + i, lanes), scale), vload_n(weight + i, lanes)), lanes);
      }
    }
  });
}

void silu_mul(const float* gate_up, float* out, int64_t num_rows, int64_t half) {
  // One row may be all there is (a decode of batch 1): cut rows into pieces as well.
  constexpr int64_t kPiece = 512;
  const int64_t pieces = ceil_div(half, kPiece);
  parallel_ranges(num_rows * pieces, 16 * min_i(half, kPiece), [=](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t r = task / pieces, first = task % pieces * kPiece, last = min_i(half, first + kPiece);
      const float* const gate = gate_up + r * 2 * half;
      for (int64_t i = first; i < last; i += kLanes) {
        const int64_t lanes = min_i(kLanes, last - i);
        vstore_n(out + r * half + i, vmul(silu(vload_n(gate + i, lanes)), vload_n(gate + half + i, lanes)), lanes);
      }
    }
  });
}

}  // namespace FE_ISA
}  // namespace fastengine
