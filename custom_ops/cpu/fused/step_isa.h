// The fused step's kernels of each instruction set, and the choice among them.
#pragma once

#include "../dispatch.h"
#include "views.h"

namespace fastengine {
namespace fused {

// What step.h, roofline.h and kernels/launchers.h declare, compiled for one instruction set.
struct StepIsa {
  const char* name;
  Isa isa;
  int64_t rows_screened;
  int64_t (*step_bytes)(const ModelView& model, const StepArgs& args, int num_threads);
  void (*run_step)(const ModelView& model, const StepArgs& args, void* memory, int num_threads);
  void (*sample_rows)(const RowSamplingArgs& args);
  int64_t (*read_all)(const uint8_t* data, int64_t num_bytes);
  int64_t (*dot_rounds)(int64_t rounds);
};

// "avx512", "avxvnni" or "avx2", whether or not this processor has it; null for another name, or one this library was built without.
const StepIsa* step_isa_named(const char* name);
// The best one that this processor has and that is not above current_isa(). AVX-512 counts with its int8 dot product only:
// processors that lack it (Skylake-X) take AVX2.
const StepIsa& best_step_isa();
bool has_step_isa(const StepIsa& set);

}  // namespace fused
}  // namespace fastengine
