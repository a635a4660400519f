#include "roofline.h"

#include "dot.h"

namespace fastengine {
namespace FE_ISA {

#if defined(FE_EMULATED)
#define FE_ANY "+m"
#else
#define FE_ANY "+v"
#endif

constexpr int kChains = 12;  // enough to hide an instruction's latency

int64_t read_all(const uint8_t* data, int64_t num_bytes) {
  Vec sums[4] = {vzero(), vzero(), vzero(), vzero()};
  constexpr int64_t kBytes = kLanes * 4;
  for (int64_t i = 0; i + 4 * kBytes <= num_bytes; i += 4 * kBytes) {
    for (int v = 0; v < 4; ++v) {
      __builtin_prefetch(data + i + v * kBytes + 2048);
      sums[v] = vmax(sums[v], vload(reinterpret_cast<const float*>(data + i + v * kBytes)));
    }
  }
  return static_cast<int64_t>(vmaximum(vmax(vmax(sums[0], sums[1]), vmax(sums[2], sums[3]))) > 0.0f);
}

int64_t dot_rounds(int64_t rounds) {
  IVec sums[kChains];
  for (IVec& sum : sums) sum = iset(0);
  const IVec weights = iset(0x01020301);
  IVec values = iset(0x00010001);
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : FE_ANY(values));
#if defined(FE_HAS_DOTS)
    for (IVec& sum : sums) add_dots(sum, weights, values);
#else
    for (IVec& sum : sums) add_short_dots(sum, weights, values);
#endif
  }
  for (IVec& sum : sums) asm volatile("" : FE_ANY(sum));
  return rounds * kChains * kLanes * 8;
}

}  // namespace FE_ISA
}  // namespace fastengine
