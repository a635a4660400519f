// Paged attention of several queries per sequence: FlashAttention-2 (Dao, 2023) on the tensor cores of sm_80
// and later, over the paged cache, chunked prefill included.
//
// Target: 60 % of the matrix peak at 8k context for head size 128.
//
// A block has a tile of 128 rows (query token, head of a group) of one KV head and goes through the visible
// context 64 tokens at a time (fewer on cards with less shared memory, from head size 192 on):
//
//   wait for keys i   barrier   start values i     S = Q K^T             keys, then values of a step use one
//   wait for values i barrier   softmax   start keys i + 1   O += P V    buffer each; copies run under the products
//
// A warp has kRowTiles tiles of 16 rows, all of the step's tokens and all value columns, so the softmax stays
// within four lanes. Rows in shared memory are padded by 16 bytes, as in decode. 8-bit caches are expanded to
// the 16-bit type on the way (exactly); their scales multiply S and P.
#include "attention_tile.h"
#include "device/tensor_core.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kPad = 8;  // elements
template <typename T_, int kHead_, int kValue_, int kStep_>
struct Config {
  using T = T_;
  static constexpr int kHead = kHead_, kValue = kValue_, kStep = kStep_;  // tokens
  static constexpr int kRowTiles = kValue > 128 ? 1 : 2;
  static constexpr int kWarps = kTileRows / (16 * kRowTiles);
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kKeyRow = kHead + kPad, kValueRow = kValue + kPad;  // elements
  static constexpr int kWidest = kKeyRow > kValueRow ? kKeyRow : kValueRow;
  // Shared memory, in bytes: queries (later the output), keys, values, the step's scales.
  static constexpr int kQueries = 0, kKeys = 2 * kTileRows * kWidest, kValues = kKeys + 2 * kStep * kKeyRow;
  static constexpr int kScales = kValues + 2 * kStep * kValueRow, kBytes = kScales + 2 * kStep * 4;
};

template <typename C>
struct PrefillBlock : TileRows<C> {
  using Rows = TileRows<C>;
  using T = typename C::T;
  using Rows::a, Rows::elements, Rows::group, Rows::is_expanded, Rows::out, Rows::rows, Rows::scores, Rows::shared, Rows::tile;

  FE_DEVICE PrefillBlock(const AttentionArgs& args, const Tile& mine) : Rows(args, mine, dynamic_shared()) {}

  FE_DEVICE float* scales() const { return reinterpret_cast<float*>(shared + C::kScales); }

  FE_DEVICE void copy_queries() {
    constexpr int kChunks = C::kHead / 8;
    const int64_t first = a.query_starts[tile.seq] + tile.first_token;
    for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kChunks; i += C::kThreads) {
      const int row = i / kChunks, at = i % kChunks * 8;
      const bool valid = row < tile.num_rows;
      const int token = valid ? row / group : 0, head = valid ? row % group : 0;
      const T* const from = static_cast<const T*>(a.query) + (first + token) * a.query_stride + (tile.kv_head * group + head) * static_cast<int64_t>(C::kHead) + at;
      copy_async_16(elements(C::kQueries) + row * C::kKeyRow + at, from, valid);
    }
  }

  // Sixteen 8-bit elements to sixteen of T.
  FE_DEVICE void expand(const void* from, bool valid, uint16_t* to) const {
    uint4 raw = make_uint4(0, 0, 0, 0);
    if (valid) raw = *static_cast<const uint4*>(from);
    float low[8], high[8];
    if (a.cache_dtype == kInt8) {
      Eight<int8_t>::unpack(make_uint2(raw.x, raw.y), low);
      Eight<int8_t>::unpack(make_uint2(raw.z, raw.w), high);
    } else {
      Eight<Fp8E4M3>::unpack(make_uint2(raw.x, raw.y), low);
      Eight<Fp8E4M3>::unpack(make_uint2(raw.z, raw.w), high);
    }
    store8(reinterpret_cast<T*>(to), low);
    store8(reinterpret_cast<T*>(to) + 8, high);
  }

  // Rows [first, first + C::kStep) of one cache into shared memory; zeros outside the visible context.
  template <int kSize>
  FE_DEVICE void start_rows(const void* cache, const float* row_scales, float shift, int first, uint16_t* to, float* to_scales) {
    constexpr int kChunks = kSize / 16;
    for (int i = static_cast<int>(threadIdx.x); i < C::kStep * kChunks; i += C::kThreads) {
      const int row = i / kChunks, at = i % kChunks * 16, token = first + row;
      const bool valid = token < tile.end;
      const int64_t from = valid ? rows.row_in(rows.blocks[token >> rows.shift], token) : 0;
      uint16_t* const target = to + row * (kSize + kPad) + at;
      if (!is_expanded()) {
        const uint16_t* const source = static_cast<const uint16_t*>(cache) + from * kSize + at;
        copy_async_16(target, source, valid);
        copy_async_16(target + 8, source + 8, valid);
      } else {
        expand(static_cast<const uint8_t*>(cache) + from * kSize + at, valid, target);
      }
      if (is_expanded() && row_scales != nullptr && at == 0) to_scales[row] = valid ? row_scales[from] * shift : 0.0f;
    }
    copy_async_commit();
  }
  FE_DEVICE void start_keys(int first) { start_rows<C::kHead>(a.key_cache, a.key_scale, 1.0f, first, elements(C::kKeys), scales()); }
  FE_DEVICE void start_values(int first) { start_rows<C::kValue>(a.value_cache, a.value_scale, kScaleShift, first, elements(C::kValues), scales() + C::kStep); }

  FE_DEVICE void multiply_keys() {
    const int lane = lane_id();
    const uint16_t* const query = elements(C::kQueries) + (warp_id() * C::kRowTiles * 16 + lane % 16) * C::kKeyRow + lane / 16 * 8;
    const uint16_t* const key = elements(C::kKeys) + (lane / 16 * 8 + lane % 8) * C::kKeyRow + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < C::kStep / 8; ++n) scores[m][n][0] = scores[m][n][1] = scores[m][n][2] = scores[m][n][3] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < C::kHead / 16; ++k) {
      uint32_t q[C::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) load_matrices(q[m], query + m * 16 * C::kKeyRow + k * 16);
#pragma unroll
      for (int n = 0; n < C::kStep / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, key + n * 16 * C::kKeyRow + k * 16);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          mma_16x8x16<T>(scores[m][2 * n], q[m], b[0], b[1]);
          mma_16x8x16<T>(scores[m][2 * n + 1], q[m], b[2], b[3]);
        }
      }
    }
  }

  FE_DEVICE void scale_keys() {
    const float* const scale = scales() + 2 * (lane_id() % 4);
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
      const float low = scale[8 * n], high = scale[8 * n + 1];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        scores[m][n][0] *= low, scores[m][n][1] *= high;
        scores[m][n][2] *= low, scores[m][n][3] *= high;
      }
    }
  }

  FE_DEVICE void multiply_values(const uint32_t (&weights)[C::kRowTiles][C::kStep / 16][4]) {
    const int lane = lane_id();
    const uint16_t* const value = elements(C::kValues) + lane % 16 * C::kValueRow + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < C::kStep / 16; ++k) {
#pragma unroll
      for (int n = 0; n < C::kValue / 16; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, value + k * 16 * C::kValueRow + n * 16);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          mma_16x8x16<T>(out[m][2 * n], weights[m][k], b[0], b[1]);
          mma_16x8x16<T>(out[m][2 * n + 1], weights[m][k], b[2], b[3]);
        }
      }
    }
  }

  FE_DEVICE void run() {
    copy_queries();
    start_keys(tile.begin);
    const int whole_begin = Rows::whole_begin(), whole_end = Rows::whole_end();
    const float* const value_scales = is_expanded() && a.value_scale != nullptr ? scales() + C::kStep : nullptr;
    for (int first = tile.begin; first < tile.end; first += C::kStep) {
      copy_async_wait<0>();
      __syncthreads();
      start_values(first);
      multiply_keys();
      if (is_expanded() && a.key_scale != nullptr) scale_keys();
      if (first < whole_begin || first + C::kStep > whole_end) Rows::mask(first);
      copy_async_wait<0>();
      __syncthreads();
      Rows::soften();
      uint32_t weights[C::kRowTiles][C::kStep / 16][4];
      Rows::pack(value_scales, weights);
      // Not before the scores' registers are free: addresses need some.
      if (first + C::kStep < tile.end) start_keys(first + C::kStep);
      multiply_values(weights);
    }
    // Nobody reads queries any more: a barrier came after the last product with them.
    Rows::write(elements(C::kQueries));
  }
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads) prefill_kernel(const AttentionArgs a) {
  Tile tile;
  if (!tile_of_block(a, &tile)) return;
  PrefillBlock<C>(a, tile).run();
}

// kFewer: tokens of a step where a block has no memory for 64 (sm_89: 99 KiB).
template <typename T, int kHead, int kValue, int kStep = 64, int kFewer = 64>
int launch_sizes(const AttentionArgs& a, cudaStream_t stream) {
  using C = Config<T, kHead, kValue, kStep>;
  if (kStep != kFewer && C::kBytes > multiprocessor_shared_bytes() - 1024) return launch_sizes<T, kHead, kValue, kFewer, kFewer>(a, stream);
  return launch(prefill_kernel<C>, grid_of_tiles(a), dim3(C::kThreads), C::kBytes, stream, a);
}

template <typename T>
int launch_type(const AttentionArgs& a, cudaStream_t stream) {
  const auto is = [&](int64_t head, int64_t value) { return a.head_size == head && a.value_size == value; };
  if (is(64, 64)) return launch_sizes<T, 64, 64>(a, stream);
  if (is(96, 96)) return launch_sizes<T, 96, 96>(a, stream);
  if (is(128, 128)) return launch_sizes<T, 128, 128>(a, stream);
  if (is(192, 128)) return launch_sizes<T, 192, 128>(a, stream);
  if (is(192, 192)) return launch_sizes<T, 192, 192, 64, 32>(a, stream);
  if (is(256, 256)) return launch_sizes<T, 256, 256, 64, 16>(a, stream);
  return kUnsupported;
}

}  // namespace

int launch_prefill(const AttentionArgs& a, cudaStream_t stream) { return a.dtype == kBFloat16 ? launch_type<BFloat16>(a, stream) : launch_type<Float16>(a, stream); }

}  // namespace cuda
}  // namespace fastengine
