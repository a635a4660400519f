// Per-head norm, rotary embedding and KV-cache write, one token at a time.
#include "launchers.h"
#include "parallel.h"

namespace fastengine {
namespace FE_ISA {
namespace {

// out = in / rms(in) * weight; in and out may be the same.
void norm_head(const float* in, const float* weight, float epsilon, float* out, int64_t n) {
  Vec sum = vzero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec value = vload_n(in + i, min_i(kLanes, n - i));
    sum = vfma(value, value, sum);
  }
  const Vec scale = vset(1.0f / __builtin_sqrtf(vsum(sum) / static_cast<float>(n) + epsilon));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = min_i(kLanes, n - i);
    vstore_n(out + i, vmul(vmul(vload_n(in + i, lanes), scale), vload_n(weight + i, lanes)), lanes);
  }
}

void copy(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = min_i(kLanes, n - i);
    vstore_n(out + i, vload_n(in + i, lanes), lanes);
  }
}

// Rotates the first 2 * half values of a head in place; cos and sin have `half` values.
void rotate_head(float* head, const float* cos, const float* sin, int64_t half, bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * cos[i] - b * sin[i];
      head[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t lanes = min_i(kLanes, half - i);
    const Vec a = vload_n(head + i, lanes), b = vload_n(head + half + i, lanes);
    const Vec c = vload_n(cos + i, lanes), s = vload_n(sin + i, lanes);
    vstore_n(head + i, vsub(vmul(a, c), vmul(b, s)), lanes);
    vstore_n(head + half + i, vfma(b, c, vmul(a, s)), lanes);
  }
}

template <typename Cache>
void store_head(const float* head, Cache* cache, int64_t n) {
  for (int64_t i = 0; i < n; ++i) from_float(head[i], cache + i);
}

struct Token {
  int64_t index;
  const float* cos;
  const float* sin;
};

void prepare_head(const RotaryArgs& a, const Token& token, const float* in, const float* norm, float* out) {
  if (norm != nullptr) {
    norm_head(in, norm, a.epsilon, out, a.head_size);
  } else if (in != out) {
    copy(in, out, a.head_size);
  }
  rotate_head(out, token.cos, token.sin, a.rotary_dim / 2, a.interleaved);
}

template <typename Cache>
void rotate_token(const RotaryArgs& a, int64_t t, float* scratch) {
  const float* const cos = a.cos_sin + a.positions[t] * a.rotary_dim;
  const Token token{t, cos, cos + a.rotary_dim / 2};
  for (int64_t h = 0; h < a.num_heads; ++h) {
    const int64_t at = h * a.head_size;
    prepare_head(a, token, a.query + t * a.query_stride + at, a.query_norm, a.query_out + t * a.query_out_stride + at);
  }
  const int64_t slot = a.slot_mapping[t];
  if (slot < 0 && a.key_out == nullptr) return;
  for (int64_t h = 0; h < a.num_kv_heads; ++h) {
    const int64_t at = h * a.head_size;
    float* const key = a.key_out != nullptr ? a.key_out + t * a.key_out_stride + at : scratch;
    prepare_head(a, token, a.key + t * a.key_stride + at, a.key_norm, key);
    if (slot < 0) continue;
    const int64_t row = (slot / a.block_size * a.num_kv_heads + h) * a.block_size + slot % a.block_size;
    store_head(key, static_cast<Cache*>(a.key_cache) + row * a.head_size, a.head_size);
    store_head(a.value + t * a.value_stride + h * a.value_size, static_cast<Cache*>(a.value_cache) + row * a.value_size, a.value_size);
  }
}

}  // namespace

void rotary_write_kv(const RotaryArgs& args) {
  const int64_t work = 6 * (args.num_heads + args.num_kv_heads) * args.head_size;
  parallel_ranges(args.num_tokens, work, [&](int64_t begin, int64_t end) {
    float* const scratch = static_cast<float*>(thread_scratch(args.head_size * static_cast<int64_t>(sizeof(float))));
    for (int64_t t = begin; t < end; ++t) {
      if (args.cache_is_bf16) {
        rotate_token<uint16_t>(args, t, scratch);
      } else {
        rotate_token<float>(args, t, scratch);
      }
    }
  });
}

}  // namespace FE_ISA
}  // namespace fastengine
