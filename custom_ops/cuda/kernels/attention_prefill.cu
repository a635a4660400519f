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
#include "attention.h"
#include "device/numeric.h"
#include "device/tensor_core.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kPad = 8;  // elements
// On the scales of 8-bit values while they multiply weights, so that products with small weights stay
// normal numbers in float16; taken off at the end. The largest, 65504 / 127 * 64, still fits.
constexpr float kScaleShift = 64.0f;

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

struct Tile {
  int seq, kv_head;
  int first_token;     // of the sequence's query rows
  int num_rows;        // rows in use
  int first_position;  // of the first token
  int begin, end;      // context that some row sees
};

template <typename C>
struct PrefillBlock {
  using T = typename C::T;
  const AttentionArgs& a;
  const Tile tile;
  unsigned char* const shared;
  const int group;
  const PagedRows rows;
  float out[C::kRowTiles][C::kValue / 8][4];
  float scores[C::kRowTiles][C::kStep / 8][4];
  float maximum[C::kRowTiles][2], sum[C::kRowTiles][2];  // of rows lane / 4 and lane / 4 + 8

  FE_DEVICE PrefillBlock(const AttentionArgs& args, const Tile& mine)
      : a(args),
        tile(mine),
        shared(dynamic_shared()),
        group(static_cast<int>(args.num_heads / args.num_kv_heads)),
        rows{args.block_tables + mine.seq * args.max_blocks, mine.kv_head, args.num_kv_heads, log2_of(args.block_size)} {}

  FE_DEVICE uint16_t* elements(int at) const { return reinterpret_cast<uint16_t*>(shared + at); }
  FE_DEVICE bool is_expanded() const { return a.cache_dtype != a.dtype; }
  FE_DEVICE float* scales() const { return reinterpret_cast<float*>(shared + C::kScales); }
  FE_DEVICE int position(int row) const { return tile.first_position + row / group; }

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

  // Takes out what a row does not see; `first` is the step's first token.
  FE_DEVICE void mask(int first) {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = (warp_id() * C::kRowTiles + m) * 16 + lane_id() / 4 + 8 * r;
        const int last = position(row) - first, start = static_cast<int>(first_visible(last + first, a.sliding_window)) - first;
#pragma unroll
        for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int token = 8 * n + 2 * (lane_id() % 4) + i;
            if (token > last || token < start) scores[m][n][2 * r + i] = kNoScore;
          }
        }
      }
    }
  }

  // Turns the scores into weights and scales earlier output and sums to the new maxima.
  FE_DEVICE void soften() {
    const float scale = a.scale * kLog2E;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = maximum[m][r];
#pragma unroll
        for (int n = 0; n < C::kStep / 8; ++n) largest = fmaxf(largest, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        // A row that sees nothing yet keeps weights of 0.
        const float base = largest > kNoScore ? largest * scale : 0.0f;
        const float rescale = fast_exp2(maximum[m][r] * scale - base);
        maximum[m][r] = largest;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < C::kStep / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = scores[m][n][2 * r + i];
            score = fast_exp2(score * scale - base);
            total += score;
          }
        }
        sum[m][r] = sum[m][r] * rescale + total;
#pragma unroll
        for (int n = 0; n < C::kValue / 8; ++n) {
          out[m][n][2 * r] *= rescale;
          out[m][n][2 * r + 1] *= rescale;
        }
      }
    }
  }

  // The weights as operands of T, values' scales included: half the registers of the scores.
  FE_DEVICE void pack(uint32_t (&weights)[C::kRowTiles][C::kStep / 16][4]) {
    const bool scaled = is_expanded() && a.value_scale != nullptr;
    const float* const scale = scales() + C::kStep + 2 * (lane_id() % 4);
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
      float low = 1.0f, high = 1.0f;
      if (scaled) low = scale[8 * n], high = scale[8 * n + 1];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        const float(&s)[4] = scores[m][n];
        weights[m][n / 2][n % 2 * 2] = pack2<T>(s[0] * low, s[1] * high);
        weights[m][n / 2][n % 2 * 2 + 1] = pack2<T>(s[2] * low, s[3] * high);
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

  // Divides by the sums and writes the warp's rows, by way of its own rows of the queries' memory.
  FE_DEVICE void write() {
    const int lane = lane_id(), first_row = warp_id() * C::kRowTiles * 16;
    uint16_t* const held = elements(C::kQueries) + first_row * C::kWidest;
    // Nobody reads queries any more: a barrier came after the last product with them.
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + lane / 4 + 8 * r;
        float total = sum[m][r];
        total += __shfl_xor_sync(kAllLanes, total, 1);
        total += __shfl_xor_sync(kAllLanes, total, 2);
        float factor = 1.0f;
        if (a.sinks != nullptr) {
          const float sink = a.sinks[tile.kv_head * group + (first_row + row) % group] * kLog2E, mine = maximum[m][r] * a.scale * kLog2E, top = fmaxf(sink, mine);
          factor = fast_exp2(mine - top);
          total = total * factor + fast_exp2(sink - top);
        }
        factor /= is_expanded() && a.value_scale != nullptr ? total * kScaleShift : total;
#pragma unroll
        for (int n = 0; n < C::kValue / 8; ++n) {
          const uint32_t pair = pack2<T>(out[m][n][2 * r] * factor, out[m][n][2 * r + 1] * factor);
          *reinterpret_cast<uint32_t*>(held + row * C::kWidest + 8 * n + 2 * (lane % 4)) = pair;
        }
      }
    }
    __syncwarp();
    constexpr int kChunks = C::kValue / 8;
    const int64_t first = a.query_starts[tile.seq] + tile.first_token;
    for (int i = lane; i < C::kRowTiles * 16 * kChunks; i += kWarp) {
      const int row = i / kChunks, at = i % kChunks * 8;
      if (first_row + row >= tile.num_rows) break;
      const int64_t token = first + (first_row + row) / group, head = tile.kv_head * group + (first_row + row) % group;
      *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + (token * a.num_heads + head) * C::kValue + at) = *reinterpret_cast<const uint4*>(held + row * C::kWidest + at);
    }
  }

  FE_DEVICE void run() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      maximum[m][0] = maximum[m][1] = kNoScore;
      sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
      for (int n = 0; n < C::kValue / 8; ++n) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.0f;
    }
    copy_queries();
    start_keys(tile.begin);
    // Steps in between are seen whole by every row.
    const int whole_begin = static_cast<int>(first_visible(position(tile.num_rows - 1), a.sliding_window)), whole_end = tile.first_position + 1;
    for (int first = tile.begin; first < tile.end; first += C::kStep) {
      copy_async_wait<0>();
      __syncthreads();
      start_values(first);
      multiply_keys();
      if (is_expanded() && a.key_scale != nullptr) scale_keys();
      if (first < whole_begin || first + C::kStep > whole_end) mask(first);
      copy_async_wait<0>();
      __syncthreads();
      soften();
      uint32_t weights[C::kRowTiles][C::kStep / 16][4];
      pack(weights);
      // Not before the scores' registers are free: addresses need some.
      if (first + C::kStep < tile.end) start_keys(first + C::kStep);
      multiply_values(weights);
    }
    write();
  }
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads) prefill_kernel(const AttentionArgs a) {
  const PlanView plan = plan_view(a);
  // Late tiles see the longest context: they start first.
  const int index = plan.num_tiles() - 1 - static_cast<int>(blockIdx.x);
  if (index < 0) return;
  const int group = static_cast<int>(a.num_heads / a.num_kv_heads), per_tile = static_cast<int>(tile_tokens(group));
  Tile tile;
  tile.seq = plan.tile_seqs()[index];
  tile.kv_head = static_cast<int>(blockIdx.y);
  tile.first_token = (index - plan.tile_starts()[tile.seq]) * per_tile;
  const int length = a.query_starts[tile.seq + 1] - a.query_starts[tile.seq];
  const int tokens = smaller(per_tile, length - tile.first_token);
  tile.num_rows = tokens * group;
  tile.first_position = a.context_lens[tile.seq] - length + tile.first_token;
  tile.begin = static_cast<int>(first_visible(tile.first_position, a.sliding_window));
  tile.end = tile.first_position + tokens;
  PrefillBlock<C>(a, tile).run();
}

// kFewer: tokens of a step where a block has no memory for 64 (sm_89: 99 KiB).
template <typename T, int kHead, int kValue, int kStep = 64, int kFewer = 64>
int launch_sizes(const AttentionArgs& a, cudaStream_t stream) {
  using C = Config<T, kHead, kValue, kStep>;
  if (kStep != kFewer && C::kBytes > multiprocessor_shared_bytes() - 1024) return launch_sizes<T, kHead, kValue, kFewer, kFewer>(a, stream);
  const dim3 grid(static_cast<unsigned>(max_tiles(a.num_seqs, a.num_tokens, a.num_heads / a.num_kv_heads)), static_cast<unsigned>(a.num_kv_heads));
  return launch(prefill_kernel<C>, grid, dim3(C::kThreads), C::kBytes, stream, a);
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
