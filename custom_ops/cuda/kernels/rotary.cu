// Per-head norm, rotary embedding (RoPE; Su et al., 2021) and KV-cache write in one pass.
//
// Target: 85 % of copy bandwidth. A head is read once, 16 bytes a lane:
//
//   lanes 0 .. head_size / 8 - 1 of a group of 8, 16 or 32 hold chunks of 8 values of one head
//   interleaved   both values of a pair are in one chunk
//   NeoX          the partner chunk is rotary_dim / 16 lanes away; where that is no whole number, the
//                 partner values are read from memory again
//   int8, fp8     the group's maximum gives the token's scale for this head
#include "device/numeric.h"
#include "device/reduce.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 128;

template <typename T>
FE_DEVICE void load_norm8(const void* weight, int32_t dtype, int at, float out[8]) {
  if (dtype == kFloat32) {
    load8(static_cast<const float*>(weight) + at, out);
  } else {
    load8(static_cast<const T*>(weight) + at, out);
  }
}

template <typename T>
FE_DEVICE float load_norm(const void* weight, int32_t dtype, int at) {
  return dtype == kFloat32 ? static_cast<const float*>(weight)[at] : to_float(static_cast<const T*>(weight)[at]);
}

// One head of one token as a group of kLanes lanes sees it.
template <typename T>
struct HeadRow {
  const T* in;
  const void* norm;  // or null
  T* out;            // or null
  int size;
  bool rotates;
};

// The values of `row` that pair with chunk `at`, normalised by `scale`, read from memory.
template <typename T>
FE_DEVICE void reload_partners(const RotaryArgs& a, const HeadRow<T>& row, int at, float scale, float out[8]) {
  const int half = static_cast<int>(a.rotary_dim) / 2;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int e = at + i;
    if (e >= a.rotary_dim) break;
    const int partner = e < half ? e + half : e - half;
    out[i] = to_float(row.in[partner]);
    if (row.norm != nullptr) out[i] *= scale * load_norm<T>(row.norm, a.norm_dtype, partner);
  }
}

// Turns the chunk at `at` of a head; every lane of the warp takes part in the exchange.
template <typename T>
FE_DEVICE void rotate(const RotaryArgs& a, const HeadRow<T>& row, const float* cos, int at, float scale, float x[8]) {
  const int half = static_cast<int>(a.rotary_dim) / 2;
  const float* const sin = cos + half;
  if (a.interleaved != 0) {
    if (!row.rotates) return;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      if (at + i >= a.rotary_dim) break;
      const float c = cos[(at + i) / 2], s = sin[(at + i) / 2], first = x[i], second = x[i + 1];
      x[i] = first * c - second * s;
      x[i + 1] = second * c + first * s;
    }
    return;
  }
  float partner[8];
  if (half % 8 == 0) {
    const int source = at < half ? lane_id() + half / 8 : lane_id() - half / 8;
    const bool exchanges = row.rotates && at < a.rotary_dim;
#pragma unroll
    for (int i = 0; i < 8; ++i) partner[i] = __shfl_sync(kAllLanes, x[i], exchanges ? source : lane_id());
  } else if (row.rotates) {
    reload_partners(a, row, at, scale, partner);
  }
  if (!row.rotates) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int e = at + i;
    if (e >= a.rotary_dim) break;
    const int angle = e < half ? e : e - half;
    x[i] = x[i] * cos[angle] + (e < half ? -partner[i] : partner[i]) * sin[angle];
  }
}

// Stores a chunk in the cache in its own type; `row` counts tokens of heads of blocks.
template <typename T, int kLanes>
FE_DEVICE void store_in_cache(const RotaryArgs& a, void* cache, float* scales, int64_t row, int size, int at, bool stores, const float x[8]) {
  if (a.cache_dtype == a.dtype) {
    if (stores && at < size) store8(static_cast<T*>(cache) + row * size + at, x);
    return;
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = at < size ? fmaxf(largest, fabsf(x[i])) : largest;
  largest = warp_reduce<kLanes>(largest, Maximum());
  const float limit = a.cache_dtype == kInt8 ? 127.0f : kFp8Largest;
  const float scale = scales == nullptr || largest == 0.0f ? 1.0f : largest / limit;
  const float inverse = 1.0f / scale;
  if (!stores || at >= size) return;
  float scaled[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) scaled[i] = x[i] * inverse;
  if (scales != nullptr && at == 0) scales[row] = scale;
  if (a.cache_dtype == kInt8) {
    store8(static_cast<int8_t*>(cache) + row * size + at, scaled);
  } else {
    store8(static_cast<Fp8E4M3*>(cache) + row * size + at, scaled);
  }
}

enum class Part { query, key, value };

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const RotaryArgs a) {
  const unsigned heads = static_cast<unsigned>(a.num_heads + 2 * a.num_kv_heads);
  const unsigned index = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const unsigned token = smaller(index / heads, static_cast<unsigned>(a.num_tokens) - 1);
  const bool in_range = index / heads < a.num_tokens;
  int head = static_cast<int>(index % heads);
  HeadRow<T> row{nullptr, nullptr, nullptr, static_cast<int>(a.head_size), true};
  Part part = Part::query;
  if (head < a.num_heads) {
    row.in = static_cast<const T*>(a.query) + token * a.query_stride + head * a.head_size;
    row.out = static_cast<T*>(a.query_out) + token * a.query_out_stride + head * a.head_size;
    row.norm = a.query_norm;
  } else if (head < a.num_heads + a.num_kv_heads) {
    part = Part::key;
    head -= static_cast<int>(a.num_heads);
    row.in = static_cast<const T*>(a.key) + token * a.key_stride + head * a.head_size;
    if (a.key_out != nullptr) row.out = static_cast<T*>(a.key_out) + token * a.key_out_stride + head * a.head_size;
    row.norm = a.key_norm;
  } else {
    part = Part::value;
    head -= static_cast<int>(a.num_heads + a.num_kv_heads);
    row = {static_cast<const T*>(a.value) + token * a.value_stride + head * a.value_size, nullptr, nullptr, static_cast<int>(a.value_size), false};
  }
  const int at = static_cast<int>(threadIdx.x) % kLanes * 8;
  float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (at < row.size) load8(row.in + at, x);
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) square += x[i] * x[i];
  const float scale = rsqrtf(warp_reduce<kLanes>(square, Sum()) / static_cast<float>(row.size) + a.epsilon);
  if (row.norm != nullptr && at < row.size) {
    float weight[8];
    load_norm8<T>(row.norm, a.norm_dtype, at, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= scale * weight[i];
  }
  rotate(a, row, a.cos_sin + static_cast<int64_t>(a.positions[token]) * a.rotary_dim, at, scale, x);
  // In place: nobody writes before everybody has read.
  __syncwarp();
  if (in_range && row.out != nullptr && at < row.size) store8(row.out + at, x);
  const int64_t slot = part == Part::query ? -1 : a.slot_mapping[token];
  const bool stores = in_range && slot >= 0;
  const int64_t block = stores ? slot / a.block_size : 0, offset = stores ? slot % a.block_size : 0;
  const int64_t cache_row = (block * a.num_kv_heads + head) * a.block_size + offset;
  const bool is_value = part == Part::value;
  store_in_cache<T, kLanes>(a, is_value ? a.value_cache : a.key_cache, is_value ? a.value_scale : a.key_scale, cache_row, row.size, at, stores, x);
}

template <typename T>
int launch_rotary(const RotaryArgs& a, cudaStream_t stream) {
  const int64_t rows = a.num_tokens * (a.num_heads + 2 * a.num_kv_heads), chunks = larger(a.head_size, a.value_size) / 8;
  const auto blocks = [&](int lanes) { return dim3(static_cast<unsigned>(ceil_div(rows, kThreads / lanes))); };
  if (chunks <= 8) return launch(rotary_kernel<T, 8>, blocks(8), dim3(kThreads), 0, stream, a);
  if (chunks <= 16) return launch(rotary_kernel<T, 16>, blocks(16), dim3(kThreads), 0, stream, a);
  return launch(rotary_kernel<T, 32>, blocks(32), dim3(kThreads), 0, stream, a);
}

bool supported(const RotaryArgs& a) {
  const bool sizes = a.head_size % 8 == 0 && a.head_size <= 256 && a.value_size % 8 == 0 && a.value_size <= 256 && a.rotary_dim % 2 == 0 && a.rotary_dim <= a.head_size;
  const bool cache = a.cache_dtype == a.dtype || a.cache_dtype == kFp8E4M3 || (a.cache_dtype == kInt8 && a.key_scale != nullptr && a.value_scale != nullptr);
  const bool norm = a.norm_dtype == kFloat32 || a.norm_dtype == a.dtype;
  return sizes && cache && norm && a.num_tokens * (a.num_heads + 2 * a.num_kv_heads) < (int64_t{1} << 31);
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(rotary_write_kv, RotaryArgs) {
  using namespace fastengine::cuda;
  if (!supported(*args)) return kUnsupported;
  if (args->num_tokens == 0) return 0;
  switch (args->dtype) {
    case kFloat32: return launch_rotary<float>(*args, static_cast<cudaStream_t>(stream));
    case kBFloat16: return launch_rotary<BFloat16>(*args, static_cast<cudaStream_t>(stream));
    case kFloat16: return launch_rotary<Float16>(*args, static_cast<cudaStream_t>(stream));
    default: return kUnsupported;
  }
}
