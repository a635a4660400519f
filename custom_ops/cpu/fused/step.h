// The fused step, once per instruction set.
#pragma once

#include "views.h"

namespace fastengine {
namespace FE_ISA {

using namespace fused;

// Bytes run_step() needs; `memory` must be 64-byte aligned.
int64_t step_bytes(const ModelView& model, const StepArgs& args, int num_threads);
void run_step(const ModelView& model, const StepArgs& args, void* memory, int num_threads);

}  // namespace FE_ISA
}  // namespace fastengine
