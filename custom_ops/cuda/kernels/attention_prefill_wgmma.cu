// Paged attention of several queries per sequence on the asynchronous matrix instructions of sm_90 (wgmma): the mathematics
// and the tiles of attention_prefill.cu, for caches of 16 bits and head sizes 64 and 128.
//
// Target: 60 % of the matrix peak at 8k context for head size 128, which mma.sync can't reach on sm_90.
//
// A block has a tile of 128 rows of one KV head, 64 for each of two warpgroups, and goes through the visible context 128
// tokens at a time, keys and values in two stages:
//
//   wait for step i   publish   barrier   start S = Q K^T   start copies of step i + 1 into the other stage
//   wait for S   softmax   O += P V, P from registers   wait for O
//
// One barrier a step, so one group's softmax runs under the other's products. All operands lie in swizzled panels
// (device/warpgroup.h): queries and keys with a row for each row of the product, values with a row for each token.
#include "attention_tile.h"
#include "device/warpgroup.h"

namespace fastengine {
namespace cuda {
namespace {

template <typename T_, int kHead_>
struct WideConfig {
  using T = T_;
  static constexpr int kHead = kHead_, kValue = kHead_, kStep = 128;  // tokens
  static constexpr int kRowTiles = 1, kThreads = 256, kWidest = kValue + 8;
  static constexpr int kPanels = kHead / kPanelColumns;
  // Bytes of a panel of queries, of keys or values; of all of one step's.
  static constexpr int kQueryPanel = kTileRows * kPanelRow, kPanel = kStep * kPanelRow, kMatrix = kPanels * kPanel;
  // Shared memory: queries (later the output, padded), then keys and values of each stage.
  static constexpr int kOutputBytes = 2 * kTileRows * kWidest;
  static constexpr int kStages = (kOutputBytes + kPanelAlignment - 1) / kPanelAlignment * kPanelAlignment;
  static constexpr int kBytes = kStages + 4 * kMatrix;
  static_assert(kPanels * kQueryPanel <= kStages && kMatrix % kPanelAlignment == 0, "panels begin at their alignment");
};

FE_DEVICE unsigned char* aligned_shared() {
  unsigned char* const shared = dynamic_shared();
  return shared + (0u - shared_address(shared) & (kPanelAlignment - 1u));
}

template <typename C>
struct WideBlock : TileRows<C> {
  using Rows = TileRows<C>;
  using T = typename C::T;
  using Rows::a, Rows::elements, Rows::group, Rows::out, Rows::rows, Rows::scores, Rows::shared, Rows::tile;

  FE_DEVICE WideBlock(const AttentionArgs& args, const Tile& mine) : Rows(args, mine, aligned_shared()) {}

  FE_DEVICE unsigned char* keys(int stage) const { return shared + C::kStages + 2 * stage * C::kMatrix; }
  FE_DEVICE unsigned char* values(int stage) const { return keys(stage) + C::kMatrix; }

  FE_DEVICE void copy_queries() {
    constexpr int kChunks = C::kHead / 8;
    const int64_t first = a.query_starts[tile.seq] + tile.first_token;
    for (int i = static_cast<int>(threadIdx.x); i < kTileRows * kChunks; i += C::kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool valid = row < tile.num_rows;
      const int token = valid ? row / group : 0, head = valid ? row % group : 0;
      const T* const from = static_cast<const T*>(a.query) + (first + token) * a.query_stride + (tile.kv_head * group + head) * static_cast<int64_t>(C::kHead) + chunk * 8;
      copy_async_16(shared + chunk / 8 * C::kQueryPanel + swizzled(row, chunk % 8), from, valid);
    }
  }

  // Keys and values of tokens [first, first + kStep); zeros outside the visible context.
  FE_DEVICE void start_copy(int first, int stage) {
    constexpr int kChunks = C::kHead / 8;
    unsigned char *const to_keys = keys(stage), *const to_values = values(stage);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < C::kStep * kChunks; i += C::kThreads) {
      const int row = i / kChunks, chunk = i % kChunks, token = first + row;
      const bool valid = token < tile.end;
      const int64_t from = (valid ? rows.row_in(rows.blocks[token >> rows.shift], token) : 0) * C::kHead + chunk * 8;
      const int to = chunk / 8 * C::kPanel + swizzled(row, chunk % 8);
      copy_async_16(to_keys + to, static_cast<const T*>(a.key_cache) + from, valid);
      copy_async_16(to_values + to, static_cast<const T*>(a.value_cache) + from, valid);
    }
    copy_async_commit();
  }

  FE_DEVICE void start_scores(int stage) {
    constexpr int kGroupRows = 8 * kPanelRow;
    const uint64_t query = matrix_operand(shared_address(shared) + static_cast<uint32_t>(warp_id() / 4 * 64 * kPanelRow), kNoLeading, kGroupRows);
    const uint64_t key = matrix_operand(shared_address(keys(stage)), kNoLeading, kGroupRows);
    products_begin();
#pragma unroll
    for (int k = 0; k < C::kHead / 16; ++k) {
      // Sixteen values are two chunks of a row.
      const int panel = k / 4, within = k % 4 * 32;
      WarpgroupProduct<T, false>::run(scores[0], moved(query, panel * C::kQueryPanel + within), moved(key, panel * C::kPanel + within), k > 0 ? 1 : 0);
    }
    products_commit();
  }

  FE_DEVICE void start_output(int stage, const uint32_t (&weights)[C::kStep / 16][4]) {
    const uint64_t value = matrix_operand(shared_address(values(stage)), C::kPanel, 8 * kPanelRow);
    products_begin();
#pragma unroll
    for (int k = 0; k < C::kStep / 16; ++k) WarpgroupProduct<T, true>::run(out[0], weights[k], moved(value, k * 16 * kPanelRow), 1);
    products_commit();
  }

  FE_DEVICE void run() {
    copy_queries();
    start_copy(tile.begin, 0);
    const int whole_begin = Rows::whole_begin(), whole_end = Rows::whole_end();
    int stage = 0;
    for (int first = tile.begin; first < tile.end; first += C::kStep, stage ^= 1) {
      copy_async_wait<0>();
      publish_to_products();
      __syncthreads();
      start_scores(stage);
      // Nobody reads the other stage any more: its products were waited for before the barrier.
      if (first + C::kStep < tile.end) start_copy(first + C::kStep, stage ^ 1);
      products_wait(scores[0]);
      if (first < whole_begin || first + C::kStep > whole_end) Rows::mask(first);
      Rows::soften();
      uint32_t weights[1][C::kStep / 16][4];
      Rows::pack(nullptr, weights);
      start_output(stage, weights[0]);
      products_wait(out[0], weights[0]);
    }
    // The output goes where other warps may still read queries.
    __syncthreads();
    Rows::write(elements(0));
  }
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1) wide_prefill_kernel(const AttentionArgs a) {
#if FE_WARPGROUP_PRODUCTS
  Tile tile;
  if (!tile_of_block(a, &tile)) return;
  WideBlock<C>(a, tile).run();
#endif
}

template <typename T, int kHead>
int launch_size(const AttentionArgs& a, cudaStream_t stream) {
  using C = WideConfig<T, kHead>;
  return launch(wide_prefill_kernel<C>, grid_of_tiles(a), dim3(C::kThreads), C::kBytes + kPanelAlignment, stream, a);
}

template <typename T>
int launch_type(const AttentionArgs& a, cudaStream_t stream) {
  return a.head_size == 64 ? launch_size<T, 64>(a, stream) : launch_size<T, 128>(a, stream);
}

}  // namespace

bool has_wide_prefill(const AttentionArgs& a) {
  const bool sizes = (a.head_size == 64 || a.head_size == 128) && a.value_size == a.head_size && a.cache_dtype == a.dtype;
  return sizes && has_warpgroup_products();
}

int launch_wide_prefill(const AttentionArgs& a, cudaStream_t stream) {
  return a.dtype == kBFloat16 ? launch_type<BFloat16>(a, stream) : launch_type<Float16>(a, stream);
}

}  // namespace cuda
}  // namespace fastengine
