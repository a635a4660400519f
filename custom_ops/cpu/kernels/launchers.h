// The launchers of one instruction set. No include guard: included once per FE_ISA.
#include "args.h"

#ifndef FE_ISA
#error "define FE_ISA (avx2 or avx512) before including launchers.h"
#endif

namespace fastengine {
namespace FE_ISA {

// out[r] = x[r] / rms(x[r]) * weight; with `residual`, residual[r] += x[r] first and is what is normalised.
void rms_norm(const float* x, float* residual, const float* weight, float epsilon, float* out, int64_t num_rows, int64_t row_size);
// gate_up [num_rows, 2 * half] -> out [num_rows, half]
void silu_mul(const float* gate_up, float* out, int64_t num_rows, int64_t half);
void rotary_write_kv(const RotaryArgs& args);
void paged_attention(const AttentionArgs& args);
// The index of each row's largest value, the lowest of equals; NaN counts as -inf.
void argmax(const float* logits, int32_t* token_ids, int64_t num_rows, int64_t vocab_size);
void sample(const SampleArgs& args);
void apply_penalties(const PenaltyArgs& args);
void log_softmax_gather(const LogprobArgs& args);
// Penalties, biases, masks, draw and log-probabilities; the logits of adjusted rows are changed.
void sample_rows(const RowSamplingArgs& args);

}  // namespace FE_ISA
}  // namespace fastengine
