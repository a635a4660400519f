// The operators as Paddle sees them: check the arguments, allocate the outputs, call the launcher.
#include "checks.h"
#include "dispatch.h"

namespace fastengine {
namespace {

using paddle::DataType;
using paddle::Tensor;
// Without the outputs that are inputs changed in place: Paddle adds those itself.
using Outputs = std::vector<Tensor>;

Tensor empty(const std::vector<int64_t>& shape, DataType dtype, const Tensor& like) { return paddle::empty(shape, dtype, like.place()); }

void* cache_data(Tensor& cache) { return cache.dtype() == DataType::FLOAT32 ? static_cast<void*>(cache.data<float>()) : cache.data<phi::dtype::bfloat16>(); }

const void* cache_data(const Tensor& cache) {
  return cache.dtype() == DataType::FLOAT32 ? static_cast<const void*>(cache.data<float>()) : cache.data<phi::dtype::bfloat16>();
}

void require_caches(const Tensor& keys, const Tensor& values, int64_t num_kv_heads, int64_t head_size, int64_t value_size) {
  require(keys.dtype() == DataType::FLOAT32 || keys.dtype() == DataType::BFLOAT16, "key_cache", "expected float32 or bfloat16");
  require_dtype(values, keys.dtype(), "value_cache");
  require_shape(keys, {-1, num_kv_heads, -1, head_size}, "key_cache");
  require_shape(values, {dim(keys, 0), num_kv_heads, dim(keys, 2), value_size}, "value_cache");
}

Outputs rms_norm(const Tensor& x, const Tensor& weight, float epsilon) {
  require_dtype(x, DataType::FLOAT32, "x");
  require(rank(x) >= 1, "x", "expected at least one axis");
  const int64_t row_size = dim(x, rank(x) - 1);
  const float* const weights = floats(weight, {row_size}, "weight");
  Tensor out = empty(x.shape(), DataType::FLOAT32, x);
  if (x.numel() > 0) FE_CALL(rms_norm)(x.data<float>(), nullptr, weights, epsilon, out.data<float>(), x.numel() / row_size, row_size);
  return {out};
}

Outputs add_rms_norm(const Tensor& x, Tensor& residual, const Tensor& weight, float epsilon) {
  require_dtype(x, DataType::FLOAT32, "x");
  require_dtype(residual, DataType::FLOAT32, "residual");
  require(rank(x) >= 1, "x", "expected at least one axis");
  require(x.dims() == residual.dims(), "residual", "expected the shape of x, " + std::string("got ") + shape_text(residual));
  const int64_t row_size = dim(x, rank(x) - 1);
  const float* const weights = floats(weight, {row_size}, "weight");
  Tensor out = empty(x.shape(), DataType::FLOAT32, x);
  if (x.numel() > 0) FE_CALL(rms_norm)(x.data<float>(), residual.data<float>(), weights, epsilon, out.data<float>(), x.numel() / row_size, row_size);
  return {out};
}

Outputs silu_mul(const Tensor& gate_up) {
  const float* const data = floats(gate_up, {-1, -1}, "gate_up");
  require(dim(gate_up, 1) % 2 == 0, "gate_up", "expected an even last axis, got " + shape_text(gate_up));
  const int64_t rows = dim(gate_up, 0), half = dim(gate_up, 1) / 2;
  Tensor out = empty({rows, half}, DataType::FLOAT32, gate_up);
  if (rows * half > 0) FE_CALL(silu_mul)(data, out.data<float>(), rows, half);
  return {out};
}

// What both forms of rotary_write_kv check and fill in alike.
void set_rotary(RotaryArgs* a, const Tensor& positions, const Tensor& cos_sin, const Tensor& slot_mapping, Tensor& key_cache, Tensor& value_cache) {
  require_caches(key_cache, value_cache, a->num_kv_heads, a->head_size, a->value_size);
  a->block_size = dim(key_cache, 2);
  a->positions = ints(positions, {a->num_tokens}, "positions");
  a->cos_sin = floats(cos_sin, {-1, -1}, "cos_sin");
  a->rotary_dim = dim(cos_sin, 1);
  require(a->rotary_dim % 2 == 0 && a->rotary_dim <= a->head_size, "cos_sin", "expected an even last axis of at most the head size, got " + shape_text(cos_sin));
  a->slot_mapping = ints(slot_mapping, {a->num_tokens}, "slot_mapping");
  require_range(a->positions, a->num_tokens, 0, dim(cos_sin, 0), "positions");
  require_range(a->slot_mapping, a->num_tokens, -1, dim(key_cache, 0) * a->block_size, "slot_mapping");
  a->key_cache = cache_data(key_cache);
  a->value_cache = cache_data(value_cache);
  a->cache_is_bf16 = key_cache.dtype() == DataType::BFLOAT16;
}

Outputs rotary_write_kv(Tensor& query, Tensor& key, const Tensor& value, const Tensor& positions, const Tensor& cos_sin, const Tensor& slot_mapping,
                        Tensor& key_cache, Tensor& value_cache, bool interleaved) {
  floats(query, {-1, -1, -1}, "query");
  floats(key, {dim(query, 0), -1, dim(query, 2)}, "key");
  floats(value, {dim(query, 0), dim(key, 1), -1}, "value");
  RotaryArgs a{};
  a.num_tokens = dim(query, 0);
  a.num_heads = dim(query, 1);
  a.num_kv_heads = dim(key, 1);
  a.head_size = dim(query, 2);
  a.value_size = dim(value, 2);
  a.interleaved = interleaved;
  set_rotary(&a, positions, cos_sin, slot_mapping, key_cache, value_cache);
  if (a.num_tokens > 0) {
    a.query = a.query_out = query.data<float>();
    a.key = a.key_out = key.data<float>();
    a.value = value.data<float>();
    a.query_stride = a.query_out_stride = a.num_heads * a.head_size;
    a.key_stride = a.key_out_stride = a.num_kv_heads * a.head_size;
    a.value_stride = a.num_kv_heads * a.value_size;
    FE_CALL(rotary_write_kv)(a);
  }
  return {};
}

Outputs rotary_write_kv_packed(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin, const Tensor& slot_mapping, Tensor& key_cache,
                               Tensor& value_cache, const paddle::optional<Tensor>& q_norm, const paddle::optional<Tensor>& k_norm, int num_heads,
                               int num_kv_heads, bool interleaved, float epsilon) {
  require(num_heads > 0, "num_heads", "must be positive");
  require(num_kv_heads > 0, "num_kv_heads", "must be positive");
  require(rank(key_cache) == 4, "key_cache", "expected 4 axes, got shape " + shape_text(key_cache));
  require(rank(value_cache) == 4, "value_cache", "expected 4 axes, got shape " + shape_text(value_cache));
  RotaryArgs a{};
  a.num_heads = num_heads;
  a.num_kv_heads = num_kv_heads;
  a.head_size = dim(key_cache, 3);
  a.value_size = dim(value_cache, 3);
  const int64_t width = (a.num_heads + a.num_kv_heads) * a.head_size + a.num_kv_heads * a.value_size;
  const float* const data = floats(qkv, {-1, width}, "qkv");
  a.num_tokens = dim(qkv, 0);
  a.interleaved = interleaved;
  a.epsilon = epsilon;
  a.query_norm = q_norm ? floats(*q_norm, {a.head_size}, "q_norm") : nullptr;
  a.key_norm = k_norm ? floats(*k_norm, {a.head_size}, "k_norm") : nullptr;
  set_rotary(&a, positions, cos_sin, slot_mapping, key_cache, value_cache);
  Tensor query = empty({a.num_tokens, a.num_heads, a.head_size}, DataType::FLOAT32, qkv);
  if (a.num_tokens > 0) {
    a.query = data;
    a.key = data + a.num_heads * a.head_size;
    a.value = a.key + a.num_kv_heads * a.head_size;
    a.query_stride = a.key_stride = a.value_stride = width;
    a.query_out = query.data<float>();
    a.query_out_stride = a.num_heads * a.head_size;
    FE_CALL(rotary_write_kv)(a);
  }
  return {query};
}

// Every index the kernels will follow, so that a wrong one is an error and not a wild read.
void require_sequences(const AttentionArgs& a, int64_t num_tokens, int64_t num_blocks) {
  require_starts(a.query_starts, a.num_seqs, num_tokens, "query_starts");
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t length = a.query_starts[s + 1] - a.query_starts[s], context = a.context_lens[s];
    if (length == 0) continue;
    require(context >= length, "context_lens", "below the sequence's own number of query tokens");
    const int64_t blocks = (context + a.block_size - 1) / a.block_size;
    require(blocks <= a.max_blocks, "block_tables", "too narrow for context_lens");
    const int64_t first = a.sliding_window > 0 ? std::max<int64_t>(0, context - length - a.sliding_window + 1) / a.block_size : 0;
    require_range(a.block_tables + s * a.max_blocks + first, blocks - first, 0, num_blocks, "block_tables");
  }
}

Outputs paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables, const Tensor& query_starts,
                        const Tensor& context_lens, float scale, int sliding_window) {
  AttentionArgs a{};
  a.query = floats(query, {-1, -1, -1}, "query");
  require_caches(key_cache, value_cache, -1, dim(query, 2), -1);
  require(sliding_window >= 0, "sliding_window", "must not be negative");
  a.key_cache = cache_data(key_cache);
  a.value_cache = cache_data(value_cache);
  a.cache_is_bf16 = key_cache.dtype() == DataType::BFLOAT16;
  a.block_tables = ints(block_tables, {-1, -1}, "block_tables");
  a.num_seqs = dim(block_tables, 0);
  a.max_blocks = dim(block_tables, 1);
  a.query_starts = ints(query_starts, {a.num_seqs + 1}, "query_starts");
  a.context_lens = ints(context_lens, {a.num_seqs}, "context_lens");
  a.scale = scale;
  a.sliding_window = sliding_window;
  a.num_heads = dim(query, 1);
  a.num_kv_heads = dim(key_cache, 1);
  a.head_size = dim(query, 2);
  a.value_size = dim(value_cache, 3);
  a.block_size = dim(key_cache, 2);
  require(a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0, "query", "expected a multiple of key_cache's heads, got shape " + shape_text(query));
  require_sequences(a, dim(query, 0), dim(key_cache, 0));
  Tensor out = empty({dim(query, 0), a.num_heads, a.value_size}, DataType::FLOAT32, query);
  if (dim(query, 0) > 0) {
    a.out = out.data<float>();
    FE_CALL(paged_attention)(a);
  }
  return {out};
}

Outputs argmax(const Tensor& logits) {
  const float* const data = floats(logits, {-1, -1}, "logits");
  const int64_t rows = dim(logits, 0), vocab_size = dim(logits, 1);
  require(vocab_size > 0, "logits", "expected a vocabulary");
  Tensor token_ids = empty({rows}, DataType::INT32, logits);
  if (rows > 0) FE_CALL(argmax)(data, token_ids.data<int32_t>(), rows, vocab_size);
  return {token_ids};
}

Outputs sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
               const Tensor& positions) {
  SampleArgs a{};
  a.logits = floats(logits, {-1, -1}, "logits");
  a.num_rows = dim(logits, 0);
  a.vocab_size = dim(logits, 1);
  require(a.vocab_size > 0, "logits", "expected a vocabulary");
  a.temperature = floats(temperature, {a.num_rows}, "temperature");
  a.top_k = ints(top_k, {a.num_rows}, "top_k");
  a.top_p = floats(top_p, {a.num_rows}, "top_p");
  a.min_p = floats(min_p, {a.num_rows}, "min_p");
  require_dtype(seeds, DataType::INT64, "seeds");
  require_shape(seeds, {a.num_rows}, "seeds");
  a.seeds = seeds.data<int64_t>();
  a.positions = ints(positions, {a.num_rows}, "positions");
  Tensor token_ids = empty({a.num_rows}, DataType::INT32, logits);
  if (a.num_rows > 0) {
    a.token_ids = token_ids.data<int32_t>();
    FE_CALL(sample)(a);
  }
  return {token_ids};
}

Outputs apply_penalties(Tensor& logits, const Tensor& repetition, const Tensor& presence, const Tensor& frequency, const Tensor& token_ids,
                        const Tensor& row_starts, const Tensor& output_starts, const Tensor& bias_ids, const Tensor& bias_values, const Tensor& bias_starts) {
  PenaltyArgs a{};
  floats(logits, {-1, -1}, "logits");
  a.num_rows = dim(logits, 0);
  a.vocab_size = dim(logits, 1);
  a.repetition = floats(repetition, {a.num_rows}, "repetition");
  a.presence = floats(presence, {a.num_rows}, "presence");
  a.frequency = floats(frequency, {a.num_rows}, "frequency");
  a.token_ids = ints(token_ids, {-1}, "token_ids");
  a.row_starts = ints(row_starts, {a.num_rows + 1}, "row_starts");
  a.row_ends = a.row_starts + 1;
  a.output_starts = ints(output_starts, {a.num_rows}, "output_starts");
  a.bias_ids = ints(bias_ids, {-1}, "bias_ids");
  a.bias_values = floats(bias_values, {dim(bias_ids, 0)}, "bias_values");
  a.bias_starts = ints(bias_starts, {a.num_rows + 1}, "bias_starts");
  require_starts(a.row_starts, a.num_rows, dim(token_ids, 0), "row_starts");
  require_starts(a.bias_starts, a.num_rows, dim(bias_ids, 0), "bias_starts");
  for (int64_t r = 0; r < a.num_rows; ++r) {
    require(a.output_starts[r] >= a.row_starts[r] && a.output_starts[r] <= a.row_starts[r + 1], "output_starts", "outside its row of token_ids");
    require(a.repetition[r] > 0.0f, "repetition", "must be positive");
  }
  if (logits.numel() > 0) {
    a.logits = logits.data<float>();
    FE_CALL(apply_penalties)(a);
  }
  return {};
}

Outputs log_softmax_gather(const Tensor& logits, const Tensor& token_ids, int k) {
  LogprobArgs a{};
  a.logits = floats(logits, {-1, -1}, "logits");
  a.num_rows = dim(logits, 0);
  a.vocab_size = dim(logits, 1);
  a.k = k;
  require(k >= 0 && k <= a.vocab_size, "k", "expected 0 to the vocabulary's size, got " + std::to_string(k));
  a.token_ids = ints(token_ids, {a.num_rows}, "token_ids");
  require_range(a.token_ids, a.num_rows, 0, a.vocab_size, "token_ids");
  Tensor logprobs = empty({a.num_rows}, DataType::FLOAT32, logits), ranks = empty({a.num_rows}, DataType::INT32, logits);
  Tensor top_ids = empty({a.num_rows, a.k}, DataType::INT32, logits), top_logprobs = empty({a.num_rows, a.k}, DataType::FLOAT32, logits);
  if (a.num_rows > 0) {
    a.logprobs = logprobs.data<float>();
    a.ranks = ranks.data<int32_t>();
    a.top_ids = k > 0 ? top_ids.data<int32_t>() : nullptr;
    a.top_logprobs = k > 0 ? top_logprobs.data<float>() : nullptr;
    FE_CALL(log_softmax_gather)(a);
  }
  return {logprobs, ranks, top_ids, top_logprobs};
}

}  // namespace
}  // namespace fastengine

PD_BUILD_OP(fastengine_rms_norm)
    .Inputs({"x", "weight"})
    .Outputs({"out"})
    .Attrs({"epsilon: float"})
    .SetKernelFn(PD_KERNEL(fastengine::rms_norm));

PD_BUILD_OP(fastengine_add_rms_norm)
    .Inputs({"x", "residual", "weight"})
    .Outputs({"residual_out", "out"})
    .Attrs({"epsilon: float"})
    .SetInplaceMap({{"residual", "residual_out"}})
    .SetKernelFn(PD_KERNEL(fastengine::add_rms_norm));

PD_BUILD_OP(fastengine_silu_mul).Inputs({"gate_up"}).Outputs({"out"}).SetKernelFn(PD_KERNEL(fastengine::silu_mul));

PD_BUILD_OP(fastengine_rotary_write_kv)
    .Inputs({"query", "key", "value", "positions", "cos_sin", "slot_mapping", "key_cache", "value_cache"})
    .Outputs({"query_out", "key_out", "key_cache_out", "value_cache_out"})
    .Attrs({"interleaved: bool"})
    .SetInplaceMap({{"query", "query_out"}, {"key", "key_out"}, {"key_cache", "key_cache_out"}, {"value_cache", "value_cache_out"}})
    .SetKernelFn(PD_KERNEL(fastengine::rotary_write_kv));

PD_BUILD_OP(fastengine_rotary_write_kv_packed)
    .Inputs({"qkv", "positions", "cos_sin", "slot_mapping", "key_cache", "value_cache", paddle::Optional("q_norm"), paddle::Optional("k_norm")})
    .Outputs({"key_cache_out", "value_cache_out", "query"})
    .Attrs({"num_heads: int", "num_kv_heads: int", "interleaved: bool", "epsilon: float"})
    .SetInplaceMap({{"key_cache", "key_cache_out"}, {"value_cache", "value_cache_out"}})
    .SetKernelFn(PD_KERNEL(fastengine::rotary_write_kv_packed));

PD_BUILD_OP(fastengine_paged_attention)
    .Inputs({"query", "key_cache", "value_cache", "block_tables", "query_starts", "context_lens"})
    .Outputs({"out"})
    .Attrs({"scale: float", "sliding_window: int"})
    .SetKernelFn(PD_KERNEL(fastengine::paged_attention));

PD_BUILD_OP(fastengine_argmax).Inputs({"logits"}).Outputs({"token_ids"}).SetKernelFn(PD_KERNEL(fastengine::argmax));

PD_BUILD_OP(fastengine_sample)
    .Inputs({"logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions"})
    .Outputs({"token_ids"})
    .SetKernelFn(PD_KERNEL(fastengine::sample));

PD_BUILD_OP(fastengine_apply_penalties)
    .Inputs({"logits", "repetition", "presence", "frequency", "token_ids", "row_starts", "output_starts", "bias_ids", "bias_values", "bias_starts"})
    .Outputs({"logits_out"})
    .SetInplaceMap({{"logits", "logits_out"}})
    .SetKernelFn(PD_KERNEL(fastengine::apply_penalties));

PD_BUILD_OP(fastengine_log_softmax_gather)
    .Inputs({"logits", "token_ids"})
    .Outputs({"logprobs", "ranks", "top_ids", "top_logprobs"})
    .Attrs({"k: int"})
    .SetKernelFn(PD_KERNEL(fastengine::log_softmax_gather));
