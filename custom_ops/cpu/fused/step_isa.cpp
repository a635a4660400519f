#include "step_isa.h"

#include <cstring>

namespace fastengine {

#define FE_DECLARE_STEP(set)                                                                                           \
  namespace set {                                                                                                      \
  int64_t step_bytes(const fused::ModelView& model, const fused::StepArgs& args, int num_threads);                     \
  void run_step(const fused::ModelView& model, const fused::StepArgs& args, void* memory, int num_threads);            \
  int64_t read_all(const uint8_t* data, int64_t num_bytes);                                                            \
  int64_t dot_rounds(int64_t rounds);                                                                                  \
  }
FE_DECLARE_STEP(avx512)
FE_DECLARE_STEP(avx2)
FE_DECLARE_STEP(avxvnni)

namespace fused {
namespace {

// Sampling has no dot products: AVX2's is AVX-VNNI's.
const StepIsa kSets[] = {
    {"avx512", Isa::kAvx512, rows_screened(true), avx512::step_bytes, avx512::run_step, avx512::sample_rows, avx512::read_all, avx512::dot_rounds},
#if FE_HAS_AVXVNNI
    {"avxvnni", Isa::kAvxVnni, rows_screened(true), avxvnni::step_bytes, avxvnni::run_step, avx2::sample_rows, avxvnni::read_all, avxvnni::dot_rounds},
#endif
    {"avx2", Isa::kAvx2, rows_screened(false), avx2::step_bytes, avx2::run_step, avx2::sample_rows, avx2::read_all, avx2::dot_rounds},
};

}  // namespace

const StepIsa* step_isa_named(const char* name) {
  for (const StepIsa& set : kSets) {
    if (std::strcmp(name, set.name) == 0) return &set;
  }
  return nullptr;
}

bool has_step_isa(const StepIsa& set) { return has_isa(set.isa) && (set.isa != Isa::kAvx512 || FE_CPU_SUPPORTS("avx512vnni")); }

const StepIsa& best_step_isa() {
  for (const StepIsa& set : kSets) {
    if (set.isa <= current_isa() && has_step_isa(set)) return set;
  }
  return *step_isa_named("avx2");
}

}  // namespace fused
}  // namespace fastengine
