// The LM head of a step: logits, or the token of the largest one.
#pragma once

#include "workspace.h"

namespace fastengine {
namespace FE_ISA {

// From the states that w.head has quantized: into s.logits and, of each thread, into w.best_values and w.best_ids, which
// hold -3.4e38 and the largest integer at the start. Every thread of the team has to come,
// with scratch memory of its own.
void compute_head(Member& me, const ModelView& m, const StepArgs& s, const Workspace& w, uint8_t* scratch);

}  // namespace FE_ISA
}  // namespace fastengine
