// What the operators over rows of logits share: one row's work.
#pragma once

#include "args.h"
#include "simd.h"

namespace fastengine {
namespace FE_ISA {

// Scratch of sample_row and logprob_row.
FE_INLINE int64_t row_scratch_bytes(int64_t vocab_size) { return 20 * (ceil_div(vocab_size, 16) * 16); }

int32_t sample_row(const SampleArgs& args, int64_t row, char* scratch);
// `seen` [vocab_size] is zero everywhere before and after: 1 + the token's count in the output, once it was met.
void penalize_row(const PenaltyArgs& args, int64_t row, int32_t* seen);
// Of `logits` [vocab_size], which need not be the row of args.logits.
void logprob_row(const LogprobArgs& args, int64_t row, const float* logits, char* scratch);

}  // namespace FE_ISA
}  // namespace fastengine
