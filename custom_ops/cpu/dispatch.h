// Chooses the instruction set of the kernels when the library is loaded; fused/step_isa.h does for the fused step.
#pragma once

#include "kernels/args.h"

// What __builtin_cpu_supports says takes the operating system into account: whether it saves the registers.
#if defined(FE_EMULATED)
#define FE_CPU_SUPPORTS(feature) true  // see emulated/avx512.h
#else
#define FE_CPU_SUPPORTS(feature) __builtin_cpu_supports(feature)
#endif

#define FE_ISA avx2
#include "kernels/launchers.h"
#undef FE_ISA
#define FE_ISA avx512
#include "kernels/launchers.h"
#undef FE_ISA

namespace fastengine {

// From the least to the best. kAvxVnni is AVX2 with the int8 dot product (VEX): only the fused step has kernels of its own for
// it. Where the compiler did not know it, no processor has it.
enum class Isa { kNone, kAvx2, kAvxVnni, kAvx512 };

// The best one that both this library and this processor have.
Isa best_isa();
// The one in use: best_isa() unless use_isa() lowered it.
Isa current_isa();
bool has_isa(Isa isa);
// False, and no change, when the processor lacks it.
bool use_isa(Isa isa);

}  // namespace fastengine

// FE_CALL(rms_norm)(...) calls the current instruction set's launcher. best_isa() is not kNone here:
// the Python side does not register the operators otherwise.
#define FE_CALL(name) \
  (::fastengine::current_isa() == ::fastengine::Isa::kAvx512 ? ::fastengine::avx512::name : ::fastengine::avx2::name)
