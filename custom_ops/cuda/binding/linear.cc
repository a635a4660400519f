// Mixture of experts around the expert products, and products with quantized weights.
#include "bind.h"

namespace fastengine {
namespace cuda {
namespace {

Outputs moe_gate(const Tensor& logits, const paddle::optional<Tensor>& bias, int top_k, int num_groups, int top_groups, bool sigmoid, bool group_by_top2,
                 bool renormalize, float scaling) {
  MoeGateArgs a{};
  a.logits = device_floats(logits, {-1, -1}, "logits");
  a.num_tokens = dim(logits, 0);
  a.num_experts = dim(logits, 1);
  a.bias = optional_floats(bias, {a.num_experts}, "bias");
  a.top_k = top_k;
  a.num_groups = num_groups;
  a.top_groups = top_groups;
  a.sigmoid = sigmoid ? 1 : 0;
  a.group_by_top2 = group_by_top2 ? 1 : 0;
  a.renormalize = renormalize ? 1 : 0;
  a.scaling = scaling;
  Tensor ids = empty({a.num_tokens, a.top_k}, DataType::INT32, logits), weights = empty({a.num_tokens, a.top_k}, DataType::FLOAT32, logits);
  a.expert_ids = ids.data<int32_t>();
  a.weights = weights.data<float>();
  FE_RUN(moe_gate, a, logits);
  return {ids, weights};
}

Outputs moe_permute(const Tensor& expert_ids, int first_expert, int num_experts, int align) {
  require(num_experts > 0 && align > 0, "num_experts", "must be positive, and align too");
  MoePermuteArgs a{};
  a.expert_ids = device_ints(expert_ids, {-1, -1}, "expert_ids");
  a.num_pairs = expert_ids.numel();
  a.first_expert = first_expert;
  a.num_experts = num_experts;
  a.align = align;
  a.max_rows = a.num_pairs + a.num_experts * (a.align - 1);
  Tensor starts = empty({a.num_experts + 1}, DataType::INT32, expert_ids), pairs = empty({a.max_rows}, DataType::INT32, expert_ids);
  Tensor rows = empty(expert_ids.shape(), DataType::INT32, expert_ids);
  a.expert_starts = starts.data<int32_t>();
  a.pair_of_row = pairs.data<int32_t>();
  a.row_of_pair = rows.data<int32_t>();
  FE_RUN(moe_permute, a, expert_ids);
  return {starts, pairs, rows};
}

Outputs moe_gather(const Tensor& x, const Tensor& pair_of_row, int top_k) {
  require(top_k > 0, "top_k", "must be positive");
  MoeGatherArgs a{};
  a.dtype = half_code(x, "x");
  require_shape(x, {-1, -1}, "x");
  a.pair_of_row = device_ints(pair_of_row, {-1}, "pair_of_row");
  a.num_rows = dim(pair_of_row, 0);
  a.row_size = dim(x, 1);
  a.top_k = top_k;
  Tensor rows = empty({a.num_rows, a.row_size}, x.dtype(), x);
  a.x = x.data();
  a.rows = rows.data();
  FE_RUN(moe_gather, a, x);
  return {rows};
}

Outputs moe_combine(const Tensor& rows, const Tensor& row_of_pair, const Tensor& weights, const paddle::optional<Tensor>& base) {
  MoeCombineArgs a{};
  a.dtype = half_code(rows, "rows");
  require_shape(rows, {-1, -1}, "rows");
  a.row_of_pair = device_ints(row_of_pair, {-1, -1}, "row_of_pair");
  a.num_tokens = dim(row_of_pair, 0);
  a.top_k = dim(row_of_pair, 1);
  a.weights = device_floats(weights, {a.num_tokens, a.top_k}, "weights");
  a.row_size = dim(rows, 1);
  if (base) {
    require_same_dtype(*base, rows, "base");
    require_shape(*base, {a.num_tokens, a.row_size}, "base");
    a.base = base->data();
  }
  Tensor out = empty({a.num_tokens, a.row_size}, rows.dtype(), rows);
  a.rows = rows.data();
  a.out = out.data();
  FE_RUN(moe_combine, a, rows);
  return {out};
}

Outputs quantized_gemm(const Tensor& x, const Tensor& weight, const Tensor& scales, const paddle::optional<Tensor>& zeros,
                       const paddle::optional<Tensor>& bias, int bits, int group_size) {
  require(bits == 4 || bits == 8, "bits", "expected 4 or 8");
  require(group_size > 0 && group_size % 32 == 0, "group_size", "expected a positive multiple of 32");
  QuantizedGemmArgs a{};
  a.dtype = half_code(x, "x");
  require_shape(x, {-1, -1}, "x");
  a.num_rows = dim(x, 0);
  a.in_size = dim(x, 1);
  a.bits = bits;
  a.group_size = group_size;
  require(a.in_size % group_size == 0, "x", "expected a last axis of a multiple of group_size, got " + shape_text(x));
  a.scales = device_floats(scales, {a.in_size / group_size, -1}, "scales");
  a.out_size = dim(scales, 1);
  require_vectors(weight, "weight");
  require_dtype(weight, DataType::UINT8, "weight");
  require_shape(weight, {a.in_size * a.out_size * bits / 8}, "weight");
  a.weight = weight.data();
  if (zeros) {
    require_on_gpu(*zeros, "zeros");
    require_dtype(*zeros, DataType::UINT8, "zeros");
    require_shape(*zeros, {a.in_size / group_size, a.out_size}, "zeros");
    a.zeros = zeros->data<uint8_t>();
  }
  if (bias) {
    require_same_dtype(*bias, x, "bias");
    require_shape(*bias, {a.out_size}, "bias");
    a.bias = bias->data();
  }
  Tensor out = empty({a.num_rows, a.out_size}, x.dtype(), x);
  a.x = x.data();
  a.out = out.data();
  FE_RUN(quantized_gemm, a, x);
  return {out};
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

PD_BUILD_OP(fastengine_cuda_moe_gate)
    .Inputs({"logits", paddle::Optional("bias")})
    .Outputs({"expert_ids", "weights"})
    .Attrs({"top_k: int", "num_groups: int", "top_groups: int", "sigmoid: bool", "group_by_top2: bool", "renormalize: bool", "scaling: float"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::moe_gate));

PD_BUILD_OP(fastengine_cuda_moe_permute)
    .Inputs({"expert_ids"})
    .Outputs({"expert_starts", "pair_of_row", "row_of_pair"})
    .Attrs({"first_expert: int", "num_experts: int", "align: int"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::moe_permute));

PD_BUILD_OP(fastengine_cuda_moe_gather)
    .Inputs({"x", "pair_of_row"})
    .Outputs({"rows"})
    .Attrs({"top_k: int"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::moe_gather));

PD_BUILD_OP(fastengine_cuda_moe_combine)
    .Inputs({"rows", "row_of_pair", "weights", paddle::Optional("base")})
    .Outputs({"out"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::moe_combine));

PD_BUILD_OP(fastengine_cuda_quantized_gemm)
    .Inputs({"x", "weight", "scales", paddle::Optional("zeros"), paddle::Optional("bias")})
    .Outputs({"out"})
    .Attrs({"bits: int", "group_size: int"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::quantized_gemm));
