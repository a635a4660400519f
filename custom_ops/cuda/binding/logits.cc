// Argmax, sampling, penalties, bitmasks and log-probabilities.
#include "bind.h"

namespace fastengine {
namespace cuda {
namespace {

const float* logit_rows(const Tensor& logits, int64_t* num_rows, int64_t* vocab_size) {
  const float* const data = device_floats(logits, {-1, -1}, "logits");
  *num_rows = dim(logits, 0);
  *vocab_size = dim(logits, 1);
  require(*vocab_size > 0, "logits", "expected a vocabulary");
  return data;
}

Outputs argmax(const Tensor& logits) {
  ArgmaxArgs a{};
  a.logits = logit_rows(logits, &a.num_rows, &a.vocab_size);
  Tensor token_ids = empty({a.num_rows}, DataType::INT32, logits);
  a.token_ids = token_ids.data<int32_t>();
  FE_RUN(argmax, a, logits);
  return {token_ids};
}

Outputs sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
               const Tensor& positions) {
  SampleArgs a{};
  a.logits = logit_rows(logits, &a.num_rows, &a.vocab_size);
  a.temperature = device_floats(temperature, {a.num_rows}, "temperature");
  a.top_k = device_ints(top_k, {a.num_rows}, "top_k");
  a.top_p = device_floats(top_p, {a.num_rows}, "top_p");
  a.min_p = device_floats(min_p, {a.num_rows}, "min_p");
  require_on_gpu(seeds, "seeds");
  require_dtype(seeds, DataType::INT64, "seeds");
  require_shape(seeds, {a.num_rows}, "seeds");
  a.seeds = seeds.data<int64_t>();
  a.positions = device_ints(positions, {a.num_rows}, "positions");
  Tensor token_ids = empty({a.num_rows}, DataType::INT32, logits);
  a.token_ids = token_ids.data<int32_t>();
  FE_RUN(sample, a, logits);
  return {token_ids};
}

Outputs apply_penalties(Tensor& logits, const Tensor& repetition, const Tensor& presence, const Tensor& frequency, const Tensor& token_ids,
                        const Tensor& row_starts, const Tensor& output_starts, const Tensor& bias_ids, const Tensor& bias_values, const Tensor& bias_starts) {
  PenaltyArgs a{};
  logit_rows(logits, &a.num_rows, &a.vocab_size);
  a.logits = logits.data<float>();
  a.repetition = device_floats(repetition, {a.num_rows}, "repetition");
  a.presence = device_floats(presence, {a.num_rows}, "presence");
  a.frequency = device_floats(frequency, {a.num_rows}, "frequency");
  a.token_ids = device_ints(token_ids, {-1}, "token_ids");
  a.row_starts = device_ints(row_starts, {a.num_rows + 1}, "row_starts");
  a.output_starts = device_ints(output_starts, {a.num_rows}, "output_starts");
  a.bias_ids = device_ints(bias_ids, {-1}, "bias_ids");
  a.bias_values = device_floats(bias_values, {dim(bias_ids, 0)}, "bias_values");
  a.bias_starts = device_ints(bias_starts, {a.num_rows + 1}, "bias_starts");
  FE_RUN(apply_penalties, a, logits);
  return {};
}

Outputs apply_bitmask(Tensor& logits, const Tensor& mask, const Tensor& rows) {
  BitmaskArgs a{};
  int64_t num_rows = 0;
  logit_rows(logits, &num_rows, &a.vocab_size);
  a.logits = logits.data<float>();
  a.mask = device_ints(mask, {-1, (a.vocab_size + 31) / 32}, "mask");
  a.num_masks = dim(mask, 0);
  a.rows = device_ints(rows, {a.num_masks}, "rows");
  FE_RUN(apply_bitmask, a, logits);
  return {};
}

Outputs log_softmax_gather(const Tensor& logits, const Tensor& token_ids, int k) {
  LogprobArgs a{};
  a.logits = logit_rows(logits, &a.num_rows, &a.vocab_size);
  a.k = k;
  require(k >= 0 && k <= a.vocab_size, "k", "expected 0 to the vocabulary's size, got " + std::to_string(k));
  a.token_ids = device_ints(token_ids, {a.num_rows}, "token_ids");
  Tensor logprobs = empty({a.num_rows}, DataType::FLOAT32, logits), ranks = empty({a.num_rows}, DataType::INT32, logits);
  Tensor top_ids = empty({a.num_rows, a.k}, DataType::INT32, logits), top_logprobs = empty({a.num_rows, a.k}, DataType::FLOAT32, logits);
  a.logprobs = logprobs.data<float>();
  a.ranks = ranks.data<int32_t>();
  a.top_ids = k > 0 ? top_ids.data<int32_t>() : nullptr;
  a.top_logprobs = k > 0 ? top_logprobs.data<float>() : nullptr;
  FE_RUN(log_softmax_gather, a, logits);
  return {logprobs, ranks, top_ids, top_logprobs};
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

PD_BUILD_OP(fastengine_cuda_argmax).Inputs({"logits"}).Outputs({"token_ids"}).SetKernelFn(PD_KERNEL(fastengine::cuda::argmax));

PD_BUILD_OP(fastengine_cuda_sample)
    .Inputs({"logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions"})
    .Outputs({"token_ids"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::sample));

PD_BUILD_OP(fastengine_cuda_apply_penalties)
    .Inputs({"logits", "repetition", "presence", "frequency", "token_ids", "row_starts", "output_starts", "bias_ids", "bias_values", "bias_starts"})
    .Outputs({"logits_out"})
    .SetInplaceMap({{"logits", "logits_out"}})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::apply_penalties));

PD_BUILD_OP(fastengine_cuda_apply_bitmask)
    .Inputs({"logits", "mask", "rows"})
    .Outputs({"logits_out"})
    .SetInplaceMap({{"logits", "logits_out"}})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::apply_bitmask));

PD_BUILD_OP(fastengine_cuda_log_softmax_gather)
    .Inputs({"logits", "token_ids"})
    .Outputs({"logprobs", "ranks", "top_ids", "top_logprobs"})
    .Attrs({"k: int"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::log_softmax_gather));
