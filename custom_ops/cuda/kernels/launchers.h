// The operators as C functions: 0 on success, kUnsupported (-1) for arguments no kernel covers, else a
// cudaError_t. Nothing is allocated and nothing waits: all of it can be captured in a CUDA graph.
//
// abi.py reads the list of operators from this file.
#pragma once

#include "args.h"

#define FE_OPERATORS(X)                               \
  X(rms_norm, RmsNormArgs)                            \
  X(silu_mul, SiluMulArgs)                            \
  X(rotary_write_kv, RotaryArgs)                      \
  X(copy_blocks, BlockCopyArgs)                       \
  X(attention_workspace, AttentionWorkspaceArgs)      \
  X(attention_plan, AttentionPlanArgs)                \
  X(paged_attention, AttentionArgs)                   \
  X(argmax, ArgmaxArgs)                               \
  X(sample, SampleArgs)                               \
  X(apply_penalties, PenaltyArgs)                     \
  X(apply_bitmask, BitmaskArgs)                       \
  X(log_softmax_gather, LogprobArgs)                  \
  X(moe_gate, MoeGateArgs)                            \
  X(moe_permute, MoePermuteArgs)                      \
  X(moe_gather, MoeGatherArgs)                        \
  X(moe_combine, MoeCombineArgs)                      \
  X(mla_decode, AttentionArgs)                        \
  X(quantized_gemm, QuantizedGemmArgs)                \
  X(fragment_probe, FragmentProbeArgs)                \
  X(product_probe, ProductProbeArgs)

#define FE_EXPORT extern "C" __attribute__((visibility("default")))
#define FE_OPERATOR(name, Args) FE_EXPORT int fe_##name(const fastengine::cuda::Args* args, void* stream)

#define FE_DECLARE(name, Args) FE_OPERATOR(name, Args);
FE_OPERATORS(FE_DECLARE)
#undef FE_DECLARE
