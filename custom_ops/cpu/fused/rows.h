// Work on single rows between the GEMMs: norm, rotation, embedding.
#pragma once

#include "activations.h"

namespace fastengine {
namespace FE_ISA {

// out = x / rms(x) * weight; out may be x.
FE_INLINE void norm_row(const float* x, const float* weight, int64_t n, float epsilon, float* out) {
  Vec sums[2] = {vzero(), vzero()};
  for (int64_t i = 0, u = 0; i < n; i += kLanes, u ^= 1) {
    const Vec value = vload_n(x + i, min_i(kLanes, n - i));
    sums[u] = vfma(value, value, sums[u]);
  }
  const Vec scale = vset(1.0f / __builtin_sqrtf(vsum(vadd(sums[0], sums[1])) / static_cast<float>(n) + epsilon));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = min_i(kLanes, n - i);
    vstore_n(out + i, vmul(vmul(vload_n(x + i, lanes), scale), vload_n(weight + i, lanes)), lanes);
  }
}

// Rotates the first rotary_dim features of one head in place. cos_sin: cosines, then sines.
FE_INLINE void rotate_head(float* x, const float* cos_sin, int64_t rotary_dim, bool interleaved) {
  const int64_t half = rotary_dim / 2;
  const float *const cosines = cos_sin, *const sines = cos_sin + half;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t lanes = min_i(kLanes, half - i);
    const Vec a = vload_n(x + i, lanes), b = vload_n(x + half + i, lanes), c = vload_n(cosines + i, lanes), s = vload_n(sines + i, lanes);
    vstore_n(x + i, vsub(vmul(a, c), vmul(b, s)), lanes);
    vstore_n(x + half + i, vfma(a, s, vmul(b, c)), lanes);
  }
}

// Row `token` of a packed table as floats [k].
void embedding_row(const LinearView& table, int64_t token, float* out);

}  // namespace FE_ISA
}  // namespace fastengine
