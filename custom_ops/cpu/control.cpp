// The library's plain C functions, for ctypes: threads and instruction set.
#include <cpuid.h>
#include <csignal>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

#include "dispatch.h"
#include "fused/step_isa.h"
#include "kernels/thread_pool.h"

namespace fastengine {
namespace {

constexpr struct {
  const char* name;
  Isa isa;
} kNames[] = {{"avx512", Isa::kAvx512}, {"avxvnni", Isa::kAvxVnni}, {"avx2", Isa::kAvx2}};

Isa isa_named(const char* name) {
  for (const auto& known : kNames) {
    if (std::strcmp(name, known.name) == 0) return known.isa;
  }
  return Isa::kNone;
}

bool hidden_avx_vnni = false;  // CPUID does not tell of it, but force_isa() saw it work

// CPUID leaf 7, subleaf 1: EAX bit 4. Not asked of the compiler, whose names for it differ.
bool cpuid_has_avx_vnni() {
  unsigned most_subleaf, a, b, c, d;
  if (!__get_cpuid_count(7, 0, &most_subleaf, &b, &c, &d) || most_subleaf < 1) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
}

Isa isa_in_use = best_isa();

// Whether a child process lives through the set's dot products.
bool survives(const fused::StepIsa& set) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);  // it takes microseconds, and nobody waits for ever
    std::signal(SIGILL, [](int) { _exit(1); });
    set.dot_rounds(1);
    _exit(0);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace

bool has_isa(Isa isa) {
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  switch (isa) {
    case Isa::kAvx2: return has_avx2;
    case Isa::kAvxVnni: return FE_HAS_AVXVNNI && has_avx2 && (hidden_avx_vnni || cpuid_has_avx_vnni());
    case Isa::kAvx512:
      return FE_CPU_SUPPORTS("avx512f") && FE_CPU_SUPPORTS("avx512bw") && FE_CPU_SUPPORTS("avx512vl") && FE_CPU_SUPPORTS("avx512dq");
    default: return false;
  }
}

Isa best_isa() {
  for (const auto& known : kNames) {
    if (has_isa(known.isa)) return known.isa;
  }
  return Isa::kNone;
}

Isa current_isa() { return isa_in_use; }

bool use_isa(Isa isa) {
  if (!has_isa(isa)) return false;
  isa_in_use = isa;
  return true;
}

}  // namespace fastengine

extern "C" {

__attribute__((visibility("default"))) void fastengine_set_num_threads(int n) { fastengine::set_num_threads(n); }

__attribute__((visibility("default"))) int fastengine_num_threads() { return fastengine::num_threads(); }

// "avx512", "avxvnni", "avx2" or "" (a processor without any).
__attribute__((visibility("default"))) const char* fastengine_isa() {
  for (const auto& known : fastengine::kNames) {
    if (known.isa == fastengine::current_isa()) return known.name;
  }
  return "";
}

// 1 when the processor has it and it is in use from now on, else 0.
__attribute__((visibility("default"))) int fastengine_use_isa(const char* name) { return fastengine::use_isa(fastengine::isa_named(name)) ? 1 : 0; }

// The same of AVX-VNNI where CPUID hides it, as some hypervisors do: a child process tries it.
__attribute__((visibility("default"))) int fastengine_force_isa(const char* name) {
  const fastengine::fused::StepIsa* const set = fastengine::fused::step_isa_named(name);
  if (set != nullptr && set->isa == fastengine::Isa::kAvxVnni && !fastengine::hidden_avx_vnni) fastengine::hidden_avx_vnni = fastengine::survives(*set);
  return fastengine_use_isa(name);
}

}  // extern "C"
