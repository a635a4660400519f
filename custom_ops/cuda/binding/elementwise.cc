// Norms, activation, rotary embedding with the cache write, and block copies.
#include "bind.h"

namespace fastengine {
namespace cuda {
namespace {

int64_t last_axis(const Tensor& x, const char* argument) {
  require(rank(x) >= 1 && dim(x, rank(x) - 1) > 0, argument, "expected at least one axis, the last one not empty");
  return dim(x, rank(x) - 1);
}

void run_norm(const Tensor& x, void* residual, const Tensor& weight, float epsilon, Tensor* out) {
  RmsNormArgs a{};
  a.row_size = last_axis(x, "x");
  a.dtype = float_code(x, "x");
  a.weight_dtype = float_code(weight, "weight");
  require(a.weight_dtype == kFloat32 || a.weight_dtype == a.dtype, "weight", "expected float32 or the dtype of x");
  require_shape(weight, {a.row_size}, "weight");
  a.x = x.data();
  a.residual = residual;
  a.weight = weight.data();
  a.out = out->data();
  a.num_rows = x.numel() / a.row_size;
  a.epsilon = epsilon;
  FE_RUN(rms_norm, a, x);
}

Outputs rms_norm(const Tensor& x, const Tensor& weight, float epsilon) {
  require_on_gpu(x, "x");
  Tensor out = empty(x.shape(), x.dtype(), x);
  run_norm(x, nullptr, weight, epsilon, &out);
  return {out};
}

Outputs add_rms_norm(const Tensor& x, Tensor& residual, const Tensor& weight, float epsilon) {
  require_on_gpu(x, "x");
  require_same_dtype(residual, x, "residual");
  require(x.dims() == residual.dims(), "residual", "expected the shape of x, got " + shape_text(residual));
  Tensor out = empty(x.shape(), x.dtype(), x);
  run_norm(x, residual.data(), weight, epsilon, &out);
  return {out};
}

Outputs silu_mul(const Tensor& gate_up) {
  SiluMulArgs a{};
  a.dtype = float_code(gate_up, "gate_up");
  require_shape(gate_up, {-1, -1}, "gate_up");
  require(dim(gate_up, 1) % 16 == 0, "gate_up", "expected a last axis of a multiple of 16, got " + shape_text(gate_up));
  a.num_rows = dim(gate_up, 0);
  a.half = dim(gate_up, 1) / 2;
  Tensor out = empty({a.num_rows, a.half}, gate_up.dtype(), gate_up);
  a.gate_up = gate_up.data();
  a.out = out.data();
  if (out.numel() > 0) FE_RUN(silu_mul, a, gate_up);
  return {out};
}

// What both forms of rotary_write_kv check and fill in alike; sizes and dtype are set.
void set_rotary(RotaryArgs* a, const Tensor& positions, const Tensor& cos_sin, const Tensor& slot_mapping, Tensor& key_cache, Tensor& value_cache,
                paddle::optional<Tensor>& key_scale, paddle::optional<Tensor>& value_scale) {
  require_vectors(key_cache, "key_cache");
  require_shape(key_cache, {-1, a->num_kv_heads, -1, a->head_size}, "key_cache");
  require_same_dtype(value_cache, key_cache, "value_cache");
  const int64_t blocks = dim(key_cache, 0);
  a->block_size = dim(key_cache, 2);
  require_shape(value_cache, {blocks, a->num_kv_heads, a->block_size, a->value_size}, "value_cache");
  a->cache_dtype = dtype_code(key_cache);
  require(a->cache_dtype == a->dtype || a->cache_dtype == kInt8 || a->cache_dtype == kFp8E4M3, "key_cache", "expected the activations' dtype, int8 or fp8");
  a->positions = device_ints(positions, {a->num_tokens}, "positions");
  a->cos_sin = device_floats(cos_sin, {-1, -1}, "cos_sin");
  a->rotary_dim = dim(cos_sin, 1);
  require(a->rotary_dim % 2 == 0 && a->rotary_dim <= a->head_size, "cos_sin", "expected an even last axis of at most the head size, got " + shape_text(cos_sin));
  a->slot_mapping = device_ints(slot_mapping, {a->num_tokens}, "slot_mapping");
  a->key_cache = key_cache.data();
  a->value_cache = value_cache.data();
  optional_floats(key_scale, {blocks, a->num_kv_heads, a->block_size}, "key_scale");
  optional_floats(value_scale, {blocks, a->num_kv_heads, a->block_size}, "value_scale");
  a->key_scale = key_scale ? key_scale->data<float>() : nullptr;
  a->value_scale = value_scale ? value_scale->data<float>() : nullptr;
  require(a->cache_dtype != kInt8 || (key_scale && value_scale), "key_scale", "an int8 cache needs key_scale and value_scale");
}

Outputs rotary_write_kv(Tensor& query, Tensor& key, const Tensor& value, const Tensor& positions, const Tensor& cos_sin, const Tensor& slot_mapping,
                        Tensor& key_cache, Tensor& value_cache, paddle::optional<Tensor>& key_scale, paddle::optional<Tensor>& value_scale,
                        bool interleaved) {
  RotaryArgs a{};
  a.dtype = float_code(query, "query");
  require_shape(query, {-1, -1, -1}, "query");
  require_same_dtype(key, query, "key");
  require_shape(key, {dim(query, 0), -1, dim(query, 2)}, "key");
  require_same_dtype(value, query, "value");
  require_shape(value, {dim(query, 0), dim(key, 1), -1}, "value");
  a.num_tokens = dim(query, 0);
  a.num_heads = dim(query, 1);
  a.num_kv_heads = dim(key, 1);
  a.head_size = dim(query, 2);
  a.value_size = dim(value, 2);
  a.norm_dtype = kFloat32;
  a.interleaved = interleaved ? 1 : 0;
  set_rotary(&a, positions, cos_sin, slot_mapping, key_cache, value_cache, key_scale, value_scale);
  if (a.num_tokens == 0) return {};
  a.query = a.query_out = query.data();
  a.key = a.key_out = key.data();
  a.value = value.data();
  a.query_stride = a.query_out_stride = a.num_heads * a.head_size;
  a.key_stride = a.key_out_stride = a.num_kv_heads * a.head_size;
  a.value_stride = a.num_kv_heads * a.value_size;
  FE_RUN(rotary_write_kv, a, query);
  return {};
}

const void* norm_weight(const paddle::optional<Tensor>& weight, RotaryArgs* a, const char* argument) {
  if (!weight) return nullptr;
  a->norm_dtype = float_code(*weight, argument);
  require_shape(*weight, {a->head_size}, argument);
  return weight->data();
}

Outputs rotary_write_kv_packed(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin, const Tensor& slot_mapping, Tensor& key_cache,
                               Tensor& value_cache, const paddle::optional<Tensor>& q_norm, const paddle::optional<Tensor>& k_norm,
                               paddle::optional<Tensor>& key_scale, paddle::optional<Tensor>& value_scale, int num_heads, int num_kv_heads,
                               bool interleaved, float epsilon) {
  require(num_heads > 0, "num_heads", "must be positive");
  require(num_kv_heads > 0, "num_kv_heads", "must be positive");
  require(rank(key_cache) == 4, "key_cache", "expected 4 axes, got shape " + shape_text(key_cache));
  require(rank(value_cache) == 4, "value_cache", "expected 4 axes, got shape " + shape_text(value_cache));
  require(!q_norm || !k_norm || q_norm->dtype() == k_norm->dtype(), "k_norm", "expected the dtype of q_norm");
  RotaryArgs a{};
  a.dtype = float_code(qkv, "qkv");
  a.num_heads = num_heads;
  a.num_kv_heads = num_kv_heads;
  a.head_size = dim(key_cache, 3);
  a.value_size = dim(value_cache, 3);
  const int64_t width = (a.num_heads + a.num_kv_heads) * a.head_size + a.num_kv_heads * a.value_size;
  require_shape(qkv, {-1, width}, "qkv");
  a.num_tokens = dim(qkv, 0);
  a.norm_dtype = kFloat32;
  a.query_norm = norm_weight(q_norm, &a, "q_norm");
  a.key_norm = norm_weight(k_norm, &a, "k_norm");
  a.interleaved = interleaved ? 1 : 0;
  a.epsilon = epsilon;
  set_rotary(&a, positions, cos_sin, slot_mapping, key_cache, value_cache, key_scale, value_scale);
  Tensor query = empty({a.num_tokens, a.num_heads, a.head_size}, qkv.dtype(), qkv);
  if (a.num_tokens > 0) {
    const int64_t item = a.dtype == kFloat32 ? 4 : 2;
    a.query = qkv.data();
    a.key = static_cast<const char*>(a.query) + a.num_heads * a.head_size * item;
    a.value = static_cast<const char*>(a.key) + a.num_kv_heads * a.head_size * item;
    a.query_stride = a.key_stride = a.value_stride = width;
    a.query_out = query.data();
    a.query_out_stride = a.num_heads * a.head_size;
    FE_RUN(rotary_write_kv, a, qkv);
  }
  return {query};
}

// Bytes of one block; sources and targets may lie in mapped host memory.
int64_t block_bytes(const Tensor& pool, const char* argument) {
  require(rank(pool) >= 2 && dim(pool, 0) > 0, argument, "expected pools of [num_blocks, ...], got shape " + shape_text(pool));
  require(reinterpret_cast<uintptr_t>(pool.data()) % 16 == 0, argument, "expected memory that begins at a multiple of 16 bytes");
  return pool.numel() / dim(pool, 0) * static_cast<int64_t>(phi::SizeOf(pool.dtype()));
}

Outputs copy_blocks(const std::vector<Tensor>& sources, std::vector<Tensor>& targets, const Tensor& source_ids, const Tensor& target_ids) {
  require(!sources.empty() && sources.size() == targets.size(), "targets", "expected as many as sources, at least one");
  BlockCopyArgs a{};
  a.block_bytes = block_bytes(sources[0], "sources");
  std::vector<const void*> from;
  std::vector<void*> to;
  for (size_t i = 0; i < sources.size(); ++i) {
    require(block_bytes(sources[i], "sources") == a.block_bytes, "sources", "expected blocks of one size in all pools");
    require(block_bytes(targets[i], "targets") == a.block_bytes, "targets", "expected blocks of the sources' size");
    from.push_back(sources[i].data());
    to.push_back(targets[i].data());
  }
  a.num_blocks = dim(source_ids, 0);
  a.source_ids = device_ints(source_ids, {-1}, "source_ids");
  a.target_ids = device_ints(target_ids, {a.num_blocks}, "target_ids");
  a.sources = from.data();
  a.targets = to.data();
  a.num_pools = static_cast<int64_t>(from.size());
  if (a.num_blocks > 0) FE_RUN(copy_blocks, a, source_ids);
  return {};
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

PD_BUILD_OP(fastengine_cuda_rms_norm)
    .Inputs({"x", "weight"})
    .Outputs({"out"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::rms_norm));

PD_BUILD_OP(fastengine_cuda_add_rms_norm)
    .Inputs({"x", "residual", "weight"})
    .Outputs({"residual_out", "out"})
    .Attrs({"epsilon: float"})
    .SetInplaceMap({{"residual", "residual_out"}})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::add_rms_norm));

PD_BUILD_OP(fastengine_cuda_silu_mul).Inputs({"gate_up"}).Outputs({"out"}).SetKernelFn(PD_KERNEL(fastengine::cuda::silu_mul));

PD_BUILD_OP(fastengine_cuda_rotary_write_kv)
    .Inputs({"query", "key", "value", "positions", "cos_sin", "slot_mapping", "key_cache", "value_cache", paddle::Optional("key_scale"),
             paddle::Optional("value_scale")})
    .Outputs({"query_out", "key_out", "key_cache_out", "value_cache_out", paddle::Optional("key_scale_out"), paddle::Optional("value_scale_out")})
    .Attrs({"interleaved: bool"})
    .SetInplaceMap({{"query", "query_out"},
                    {"key", "key_out"},
                    {"key_cache", "key_cache_out"},
                    {"value_cache", "value_cache_out"},
                    {paddle::Optional("key_scale"), paddle::Optional("key_scale_out")},
                    {paddle::Optional("value_scale"), paddle::Optional("value_scale_out")}})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::rotary_write_kv));

PD_BUILD_OP(fastengine_cuda_rotary_write_kv_packed)
    .Inputs({"qkv", "positions", "cos_sin", "slot_mapping", "key_cache", "value_cache", paddle::Optional("q_norm"), paddle::Optional("k_norm"),
             paddle::Optional("key_scale"), paddle::Optional("value_scale")})
    .Outputs({"key_cache_out", "value_cache_out", paddle::Optional("key_scale_out"), paddle::Optional("value_scale_out"), "query"})
    .Attrs({"num_heads: int", "num_kv_heads: int", "interleaved: bool", "epsilon: float"})
    .SetInplaceMap({{"key_cache", "key_cache_out"},
                    {"value_cache", "value_cache_out"},
                    {paddle::Optional("key_scale"), paddle::Optional("key_scale_out")},
                    {paddle::Optional("value_scale"), paddle::Optional("value_scale_out")}})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::rotary_write_kv_packed));

PD_BUILD_OP(fastengine_cuda_copy_blocks)
    .Inputs({paddle::Vec("sources"), paddle::Vec("targets"), "source_ids", "target_ids"})
    .Outputs({paddle::Vec("targets_out")})
    .SetInplaceMap({{paddle::Vec("targets"), paddle::Vec("targets_out")}})
    .SetKernelFn(PD_KERNEL(fastengine::cuda::copy_blocks));
