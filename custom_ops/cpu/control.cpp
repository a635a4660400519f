// The library's plain C functions, for ctypes: threads and instruction set.
#include <cstring>

#include "dispatch.h"
#include "kernels/thread_pool.h"

namespace fastengine {
namespace {

Isa isa_in_use = best_isa();

}  // namespace

Isa best_isa() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
  return Isa::kNone;
}

Isa current_isa() { return isa_in_use; }

bool use_isa(Isa isa) {
  if (isa == Isa::kNone || isa > best_isa()) return false;
  isa_in_use = isa;
  return true;
}

}  // namespace fastengine

extern "C" {

__attribute__((visibility("default"))) void fastengine_set_num_threads(int n) { fastengine::set_num_threads(n); }

__attribute__((visibility("default"))) int fastengine_num_threads() { return fastengine::num_threads(); }

// "avx512", "avx2" or "" (a processor without either).
__attribute__((visibility("default"))) const char* fastengine_isa() {
  switch (fastengine::current_isa()) {
    case fastengine::Isa::kAvx512: return "avx512";
    case fastengine::Isa::kAvx2: return "avx2";
    default: return "";
  }
}

// 1 when the processor has it and it is in use from now on, else 0.
__attribute__((visibility("default"))) int fastengine_use_isa(const char* name) {
  if (std::strcmp(name, "avx512") == 0) return fastengine::use_isa(fastengine::Isa::kAvx512) ? 1 : 0;
  if (std::strcmp(name, "avx2") == 0) return fastengine::use_isa(fastengine::Isa::kAvx2) ? 1 : 0;
  return 0;
}

}  // extern "C"
