// Paged attention and its plan, and attention over a latent cache. Workspace comes from Paddle's allocator.
#include "bind.h"

namespace fastengine {
namespace cuda {
namespace {

struct Workspace {
  int64_t plan_ints, partial_floats;
};

Workspace workspace_of(const AttentionArgs& a) {
  Workspace w{};
  AttentionWorkspaceArgs sizes{a.num_seqs, a.num_tokens, a.max_blocks, a.block_size, a.num_heads, a.num_kv_heads, a.value_size, &w.plan_ints, &w.partial_floats};
  require_launched(fe_attention_workspace(&sizes, nullptr), "attention_workspace");
  return w;
}

// Sizes, batch and caches of an attention over blocks of [num_kv_heads, block_size].
void set_batch(AttentionArgs* a, const Tensor& query, const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens) {
  require_shape(query, {-1, -1, -1}, "query");
  a->query = query.data();
  a->num_tokens = dim(query, 0);
  a->num_heads = dim(query, 1);
  a->head_size = dim(query, 2);
  a->query_stride = a->num_heads * a->head_size;
  a->block_tables = device_ints(block_tables, {-1, -1}, "block_tables");
  a->num_seqs = dim(block_tables, 0);
  a->max_blocks = dim(block_tables, 1);
  a->query_starts = device_ints(query_starts, {a->num_seqs + 1}, "query_starts");
  a->context_lens = device_ints(context_lens, {a->num_seqs}, "context_lens");
}

Tensor make_plan(const AttentionArgs& a, const Workspace& w, const Tensor& like) {
  Tensor plan = empty({w.plan_ints}, DataType::INT32, like);
  AttentionPlanArgs p{a.query_starts, a.context_lens, plan.data<int32_t>(), a.num_seqs, a.num_tokens, a.sliding_window, a.num_heads, a.num_kv_heads};
  FE_RUN(attention_plan, p, like);
  return plan;
}

// A plan that serves every layer of a step with the same heads and window.
Outputs attention_plan(const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens, int64_t num_tokens, int num_heads,
                       int num_kv_heads, int block_size, int sliding_window) {
  require(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, "num_heads", "expected a multiple of num_kv_heads");
  AttentionArgs a{};
  a.num_tokens = num_tokens;
  a.num_heads = num_heads;
  a.num_kv_heads = num_kv_heads;
  a.block_size = block_size;
  a.value_size = 8;
  a.sliding_window = sliding_window;
  device_ints(block_tables, {-1, -1}, "block_tables");
  a.num_seqs = dim(block_tables, 0);
  a.max_blocks = dim(block_tables, 1);
  a.query_starts = device_ints(query_starts, {a.num_seqs + 1}, "query_starts");
  a.context_lens = device_ints(context_lens, {a.num_seqs}, "context_lens");
  return {make_plan(a, workspace_of(a), context_lens)};
}

// Fills in plan and partial results, and holds on to their memory while the launch is made.
struct Scratch {
  Tensor plan, partials;

  Scratch(AttentionArgs* a, const paddle::optional<Tensor>& given, const Tensor& like) {
    const Workspace w = workspace_of(*a);
    if (given) {
      device_ints(*given, {w.plan_ints}, "plan");
      plan = *given;
    } else {
      plan = make_plan(*a, w, like);
    }
    partials = empty({w.partial_floats}, DataType::FLOAT32, like);
    a->plan = plan.data<int32_t>();
    a->partials = partials.data<float>();
  }
};

Outputs paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables, const Tensor& query_starts,
                        const Tensor& context_lens, const paddle::optional<Tensor>& key_scale, const paddle::optional<Tensor>& value_scale,
                        const paddle::optional<Tensor>& sinks, const paddle::optional<Tensor>& plan, float scale, int sliding_window,
                        int max_query_tokens, bool wide_prefill) {
  AttentionArgs a{};
  a.dtype = half_code(query, "query");
  set_batch(&a, query, block_tables, query_starts, context_lens);
  require_vectors(key_cache, "key_cache");
  require_shape(key_cache, {-1, -1, -1, a.head_size}, "key_cache");
  require_same_dtype(value_cache, key_cache, "value_cache");
  const int64_t blocks = dim(key_cache, 0);
  a.num_kv_heads = dim(key_cache, 1);
  a.block_size = dim(key_cache, 2);
  require_shape(value_cache, {blocks, a.num_kv_heads, a.block_size, -1}, "value_cache");
  a.value_size = dim(value_cache, 3);
  a.cache_dtype = dtype_code(key_cache);
  require(a.cache_dtype == a.dtype || a.cache_dtype == kInt8 || a.cache_dtype == kFp8E4M3, "key_cache", "expected the dtype of query, int8 or fp8");
  require(a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0, "query", "expected a multiple of key_cache's heads, got shape " + shape_text(query));
  require(sliding_window >= 0, "sliding_window", "must not be negative");
  a.key_cache = key_cache.data();
  a.value_cache = value_cache.data();
  a.key_scale = optional_floats(key_scale, {blocks, a.num_kv_heads, a.block_size}, "key_scale");
  a.value_scale = optional_floats(value_scale, {blocks, a.num_kv_heads, a.block_size}, "value_scale");
  require(a.cache_dtype != kInt8 || (a.key_scale != nullptr && a.value_scale != nullptr), "key_scale", "an int8 cache needs key_scale and value_scale");
  a.sinks = optional_floats(sinks, {a.num_heads}, "sinks");
  a.scale = scale;
  a.sliding_window = sliding_window;
  a.max_query_tokens = max_query_tokens;
  a.wide_prefill = wide_prefill ? 1 : 0;
  Tensor out = empty({a.num_tokens, a.num_heads, a.value_size}, query.dtype(), query);
  if (a.num_tokens == 0) return {out};
  const Scratch scratch(&a, plan, query);
  a.out = out.data();
  FE_RUN(paged_attention, a, query);
  return {out};
}

Outputs mla_decode(const Tensor& query, const Tensor& latent_cache, const Tensor& block_tables, const Tensor& query_starts, const Tensor& context_lens,
                   const paddle::optional<Tensor>& plan, float scale, int value_size) {
  AttentionArgs a{};
  a.dtype = a.cache_dtype = half_code(query, "query");
  set_batch(&a, query, block_tables, query_starts, context_lens);
  require_same_dtype(latent_cache, query, "latent_cache");
  require_shape(latent_cache, {-1, -1, a.head_size}, "latent_cache");
  require(value_size > 0 && value_size <= a.head_size, "value_size", "expected 1 to the cache's last axis");
  a.num_kv_heads = 1;
  a.block_size = dim(latent_cache, 1);
  a.value_size = value_size;
  a.key_cache = latent_cache.data();
  a.scale = scale;
  a.max_query_tokens = 1;
  Tensor out = empty({a.num_tokens, a.num_heads, a.value_size}, query.dtype(), query);
  if (a.num_tokens == 0) return {out};
  const Scratch scratch(&a, plan, query);
  a.out = out.data();
  FE_RUN(mla_decode, a, query);
  return {out};
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

PD_BUILD_OP(fastengine_cuda_attention_plan)
    .Inputs({"block_tables", "query_starts", "context_lens"})
    .Outputs({"plan"})
    .Attrs({"num_tokens: int64_t", "num_heads: int", "num_kv_heads: int", "block_size: int", "sliding_window: int"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::attention_plan));

PD_BUILD_OP(fastengine_cuda_paged_attention)
    .Inputs({"query", "key_cache", "value_cache", "block_tables", "query_starts", "context_lens", paddle::Optional("key_scale"),
             paddle::Optional("value_scale"), paddle::Optional("sinks"), paddle::Optional("plan")})
    .Outputs({"out"})
    .Attrs({"scale: float", "sliding_window: int", "max_query_tokens: int", "wide_prefill: bool"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::paged_attention));

PD_BUILD_OP(fastengine_cuda_mla_decode)
    .Inputs({"query", "latent_cache", "block_tables", "query_starts", "context_lens", paddle::Optional("plan")})
    .Outputs({"out"})
    .Attrs({"scale: float", "value_size: int"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::mla_decode));
