// Chooses the instruction set of the kernels when the library is loaded.
#pragma once

#include "kernels/args.h"

#define FE_ISA avx2
#include "kernels/launchers.h"
#undef FE_ISA
#define FE_ISA avx512
#include "kernels/launchers.h"
#undef FE_ISA

namespace fastengine {

enum class Isa { kNone, kAvx2, kAvx512 };

// The best one that both this library and this processor have.
Isa best_isa();
// The one in use: best_isa() unless use_isa() lowered it.
Isa current_isa();
// False, and no change, when the processor lacks it.
bool use_isa(Isa isa);

}  // namespace fastengine

// FE_CALL(rms_norm)(...) calls the current instruction set's launcher. best_isa() is not kNone here:
// the Python side does not register the operators otherwise.
#define FE_CALL(name) \
  (::fastengine::current_isa() == ::fastengine::Isa::kAvx512 ? ::fastengine::avx512::name : ::fastengine::avx2::name)
