// Work on single rows between the GEMMs: norm, rotation, embedding.
#pragma once

#include "activations.h"

namespace fastengine {
namespace FE_ISA {

// Lanes 1, 0, 3, 2, ... of x.
#if defined(__AVX512F__)
FE_INLINE Vec vswap_pairs(Vec x) { return _mm512_permute_ps(x, 0xb1); }
#else
FE_INLINE Vec vswap_pairs(Vec x) { return _mm256_permute_ps(x, 0xb1); }
#endif

// 1 / rms(x)
FE_INLINE float norm_factor(const float* x, int64_t n, float epsilon) {
  Vec sums[2] = {vzero(), vzero()};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    for (int u = 0; u < 2; ++u) sums[u] = vfma(vload(x + i + u * kLanes), vload(x + i + u * kLanes), sums[u]);
  }
  for (int u = 0; i < n; i += kLanes, ++u) {
    const Vec value = vload_n(x + i, min_i(kLanes, n - i));
    sums[u] = vfma(value, value, sums[u]);
  }
  return 1.0f / __builtin_sqrtf(vsum(vadd(sums[0], sums[1])) / static_cast<float>(n) + epsilon);
}

// out = x / rms(x) * weight; out may be x.
FE_INLINE void norm_row(const float* x, const float* weight, int64_t n, float epsilon, float* out) {
  const Vec scale = vset(norm_factor(x, n, epsilon));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = min_i(kLanes, n - i);
    vstore_n(out + i, vmul(vmul(vload_n(x + i, lanes), scale), vload_n(weight + i, lanes)), lanes);
  }
}

// One position's rotation of the first rotary_dim features of a head. cos_sin: cosines, then sines.
// `scratch` takes 2 * rotary_dim floats.
class Rotation {
 public:
  __attribute__((always_inline)) Rotation(const float* cos_sin, int64_t rotary_dim, bool interleaved, float* scratch)
      : cosines_(cos_sin), sines_(cos_sin + rotary_dim / 2), size_(rotary_dim), interleaved_(interleaved) {
    if (!interleaved) return;
    float *const cosines = scratch, *const sines = scratch + rotary_dim;
    for (int64_t i = 0; i < rotary_dim / 2; ++i) {
      cosines[2 * i] = cosines[2 * i + 1] = cosines_[i];
      sines[2 * i] = -sines_[i];
      sines[2 * i + 1] = sines_[i];
    }
    cosines_ = cosines;
    sines_ = sines;
  }

  // Of the first rotary_dim features of x; out may be x.
  __attribute__((always_inline)) void apply(const float* x, float* out) const {
    if (interleaved_) {
      for (int64_t i = 0; i < size_; i += kLanes) {
        const int64_t n = min_i(kLanes, size_ - i);
        const Vec value = vload_n(x + i, n);
        vstore_n(out + i, vfma(vload_n(cosines_ + i, n), value, vmul(vload_n(sines_ + i, n), vswap_pairs(value))), n);
      }
      return;
    }
    const int64_t half = size_ / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t n = min_i(kLanes, half - i);
      const Vec a = vload_n(x + i, n), b = vload_n(x + half + i, n), c = vload_n(cosines_ + i, n), s = vload_n(sines_ + i, n);
      vstore_n(out + i, vsub(vmul(a, c), vmul(b, s)), n);
      vstore_n(out + half + i, vfma(a, s, vmul(b, c)), n);
    }
  }

 private:
  const float *cosines_, *sines_;
  int64_t size_;
  bool interleaved_;
};

// Row `token` of a packed table as floats [k].
void embedding_row(const LinearView& table, int64_t token, float* out);

}  // namespace FE_ISA
}  // namespace fastengine
