// Paged attention of one query per sequence: flash-decoding (Dao et al., 2023) on CUDA cores.
//
// Target: 85 % of copy bandwidth from 4k context and 16 sequences on, for up to 8 query heads per KV head
// at 16 bits and 4 at 8 bits; beyond, arithmetic is the limit.
//
// A block of 128 threads takes pieces (range of one sequence's context, KV head, up to kHeads query heads)
// until none is left. A piece goes through tiles of 32 or 64 tokens in two stages of shared memory: while
// one is computed, the next is copied, 16 bytes a copy.
//
//   scores   a thread has one token of the tile and every 2nd (4th) 16-byte chunk of its key
//   softmax  lane l of each warp follows head l % kHeads; all warps compute the same maximum
//   values   a thread has 8 columns and every R-th token; R partial sums are added at the end of the piece
//
// A row of a tile is padded by 16 bytes: rows then start an odd number of chunks apart, which spreads the
// eight lanes of an access over all banks. Head and value size are run-time values outside inner loops.
#include "attention.h"
#include "device/numeric.h"
#include "device/reduce.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kStages = 2;
constexpr int kMaxTile = 64;
constexpr int kPad = 16;         // bytes
constexpr int kIds = 16;         // block ids of a tile: at most kMaxTile / 8 + 1

FE_HOST_DEVICE int64_t padded_row(int64_t elements, int64_t bytes) { return elements * bytes + kPad; }

// Where things lie in shared memory, in bytes.
struct Layout {
  int tile;  // tokens
  int query, scores, weights, sums, ids, scales, stages, stage_bytes, total;

  FE_HOST_DEVICE Layout(const AttentionArgs& a, int heads, int tile_tokens) : tile(tile_tokens) {
    const int64_t item = element_bytes(a.cache_dtype);
    query = 0;
    scores = query + heads * static_cast<int>(a.head_size) * 4;
    weights = scores + heads * tile * 4;
    sums = weights + heads * tile * 4;
    ids = sums + kWarps * heads * 4 + 16;
    scales = static_cast<int>(round_up(ids + 2 * kIds * 4, 16));
    stages = scales + kStages * 2 * tile * 4;
    stage_bytes = static_cast<int>(tile * (padded_row(a.head_size, item) + padded_row(a.value_size, item)));
    // At the end of a piece the stages hold half of the partial sums.
    const int64_t groups = kThreads / (a.value_size / 8);
    total = stages + static_cast<int>(larger<int64_t>(kStages * stage_bytes, (groups + 1) / 2 * heads * a.value_size * 4));
  }
};

struct Piece {
  int seq, index;     // and number of the piece among all
  int kv_head;
  int first_head;     // of the group
  int begin, end;     // tokens
  bool is_only;       // the sequence has no other
};

template <typename Cache, int kHeads>
struct DecodeBlock {
  const AttentionArgs& a;
  const Layout layout;
  unsigned char* const shared;
  const int shift;
  // Copying: the thread's first row and its chunk of 16 bytes, for keys and for values.
  int key_row, key_chunk, key_rows, value_row, value_chunk, value_rows;
  // Values: the thread's first token and chunk of 8 columns.
  int column_row, column_chunk, column_rows;
  PagedRows rows;
  int32_t next_id;
  float maximum, sum;  // of head lane % kHeads; the sum is this lane's share
  float out[kHeads][8];

  FE_DEVICE DecodeBlock(const AttentionArgs& args, const Layout& where)
      : a(args), layout(where), shared(dynamic_shared()), shift(log2_of(args.block_size)), rows{nullptr, 0, args.num_kv_heads, 0} {
    const int thread = static_cast<int>(threadIdx.x), item = static_cast<int>(element_bytes(a.cache_dtype));
    const int key_chunks = static_cast<int>(a.head_size) * item / 16, value_chunks = static_cast<int>(a.value_size) * item / 16;
    key_row = thread / key_chunks, key_chunk = thread % key_chunks, key_rows = kThreads / key_chunks;
    value_row = thread / value_chunks, value_chunk = thread % value_chunks, value_rows = kThreads / value_chunks;
    const int columns = static_cast<int>(a.value_size) / 8;
    column_row = thread / columns, column_chunk = thread % columns, column_rows = kThreads / columns;
    rows.shift = shift;
  }

  FE_DEVICE float* floats(int at) const { return reinterpret_cast<float*>(shared + at); }
  FE_DEVICE int32_t* tile_ids(int tile_index) const { return reinterpret_cast<int32_t*>(shared + layout.ids) + (tile_index & 1) * kIds; }
  FE_DEVICE unsigned char* keys(int stage) const { return shared + layout.stages + stage * layout.stage_bytes; }
  FE_DEVICE unsigned char* values(int stage) const { return keys(stage) + layout.tile * padded_row(a.head_size, sizeof(Cache)); }
  FE_DEVICE float* key_scales(int stage) const { return floats(layout.scales) + stage * 2 * layout.tile; }

  // The block id that this thread fetches for the tile of tokens from `first` on; kept in a register.
  FE_DEVICE void fetch_id(const Piece& piece, int first) {
    const int block = (first >> shift) + static_cast<int>(threadIdx.x);
    next_id = threadIdx.x < kIds && first < piece.end && block <= (piece.end - 1) >> shift ? rows.blocks[block] : 0;
  }
  FE_DEVICE void keep_id(int tile_index) {
    if (threadIdx.x < kIds) tile_ids(tile_index)[threadIdx.x] = next_id;
  }

  FE_DEVICE void copy_rows(const void* cache, int64_t size, unsigned char* to, int row, int chunk, int step, const Piece& piece, int first, const int32_t* ids) {
    if (row >= step) return;  // threads left over where a row's chunks do not divide the block
    const int64_t row_bytes = size * static_cast<int64_t>(sizeof(Cache));
    for (; row < layout.tile; row += step) {
      const int token = first + row;
      const bool valid = token < piece.end;
      const int64_t from = valid ? rows.row_in(ids[(token >> shift) - (first >> shift)], token) : 0;
      copy_async_16(to + row * (row_bytes + kPad) + chunk * 16, static_cast<const unsigned char*>(cache) + from * row_bytes + chunk * 16, valid);
    }
  }

  FE_DEVICE void start_copy(const Piece& piece, int tile_index) {
    const int stage = tile_index % kStages, first = piece.begin + tile_index * layout.tile;
    const int32_t* const ids = tile_ids(tile_index);
    copy_rows(a.key_cache, a.head_size, keys(stage), key_row, key_chunk, key_rows, piece, first, ids);
    copy_rows(a.value_cache, a.value_size, values(stage), value_row, value_chunk, value_rows, piece, first, ids);
    const int row = static_cast<int>(threadIdx.x);
    if (sizeof(Cache) == 1 && row < layout.tile) {
      const int token = first + row;
      const bool valid = token < piece.end;
      const int64_t from = valid ? rows.row_in(ids[(token >> shift) - (first >> shift)], token) : 0;
      if (a.key_scale != nullptr) copy_async_4(key_scales(stage) + row, a.key_scale + from, valid);
      if (a.value_scale != nullptr) copy_async_4(key_scales(stage) + layout.tile + row, a.value_scale + from, valid);
    }
    copy_async_commit();
  }

  FE_DEVICE void load_query(const Piece& piece) {
    float* const query = floats(layout.query);
    const int group = static_cast<int>(a.num_heads / a.num_kv_heads);
    const int chunks = static_cast<int>(a.head_size) / 8;
    const int64_t token = a.query_starts[piece.seq];
    for (int i = static_cast<int>(threadIdx.x); i < kHeads * chunks; i += kThreads) {
      const int head = piece.first_head + i / chunks, at = i % chunks * 8;
      float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      if (head < group) {
        const int64_t from = token * a.query_stride + (piece.kv_head * group + head) * a.head_size + at;
        if (a.dtype == kBFloat16) {
          load8(static_cast<const BFloat16*>(a.query) + from, x);
        } else {
          load8(static_cast<const Float16*>(a.query) + from, x);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] *= a.scale * kLog2E;
      store8(query + i * 8, x);
    }
  }

  // scores[token][head] of the tile, in units of log2; kNoScore past the end.
  FE_DEVICE void score(const Piece& piece, int tile_index) {
    constexpr int kChunk = 16 / static_cast<int>(sizeof(Cache));  // elements
    const int stage = tile_index % kStages, per_warp = layout.tile / kWarps;
    const int token = warp_id() * per_warp + lane_id() % per_warp, part = lane_id() / per_warp, parts = kWarp / per_warp;
    const unsigned char* const key = keys(stage) + token * padded_row(a.head_size, sizeof(Cache));
    const float* const query = floats(layout.query);
    const int size = static_cast<int>(a.head_size), chunks = size / kChunk;
    float dots[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) dots[h] = 0.0f;
    for (int c = part; c < chunks; c += parts) {
      float x[kChunk];
      load8(reinterpret_cast<const Cache*>(key + c * 16), x);
      if (kChunk == 16) load8(reinterpret_cast<const Cache*>(key + c * 16 + 8), x + kChunk - 8);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int j = 0; j < kChunk; j += 4) {
          const float4 q = *reinterpret_cast<const float4*>(query + h * size + c * kChunk + j);
          dots[h] += q.x * x[j] + q.y * x[j + 1] + q.z * x[j + 2] + q.w * x[j + 3];
        }
      }
    }
    for (int bits = per_warp; bits < kWarp; bits *= 2) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) dots[h] += __shfl_xor_sync(kAllLanes, dots[h], bits);
    }
    if (part != 0) return;
    const bool valid = piece.begin + tile_index * layout.tile + token < piece.end;
    const float scale = sizeof(Cache) == 1 && a.key_scale != nullptr ? key_scales(stage)[token] : 1.0f;
    float* const scores = floats(layout.scores) + token * kHeads;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) scores[h] = valid ? dots[h] * scale : kNoScore;
  }

  // Weights of the tile's tokens from their scores. Returns what earlier output is to be multiplied by,
  // for head lane % kHeads.
  FE_DEVICE float soften(int tile_index) {
    const float* const scores = floats(layout.scores);
    float* const weights = floats(layout.weights);
    const int count = layout.tile * kHeads;
    float largest = maximum;
    for (int i = lane_id(); i < count; i += kWarp) largest = fmaxf(largest, scores[i]);
#pragma unroll
    for (int bits = kWarp / 2; bits >= kHeads; bits /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, bits));
    const float rescale = fast_exp2(maximum - largest);
    maximum = largest;
    sum *= rescale;
    const float* const value_scales = key_scales(tile_index % kStages) + layout.tile;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      // A multiple of 32 apart: i % kHeads == lane % kHeads.
      const float weight = fast_exp2(scores[i] - largest);
      sum += weight;
      weights[i] = sizeof(Cache) == 1 && a.value_scale != nullptr ? weight * value_scales[i / kHeads] : weight;
    }
    return rescale;
  }

  FE_DEVICE void add_values(int tile_index, float rescale) {
    if (__any_sync(kAllLanes, rescale != 1.0f)) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float factor = __shfl_sync(kAllLanes, rescale, h);
#pragma unroll
        for (int j = 0; j < 8; ++j) out[h][j] *= factor;
      }
    }
    if (column_row >= column_rows) return;
    const unsigned char* const value = values(tile_index % kStages) + column_chunk * 8 * sizeof(Cache);
    const int64_t stride = padded_row(a.value_size, sizeof(Cache));
    const float* const weights = floats(layout.weights);
#pragma unroll 2
    for (int token = column_row; token < layout.tile; token += column_rows) {
      float x[8];
      load8(reinterpret_cast<const Cache*>(value + token * stride), x);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = weights[token * kHeads + h];
#pragma unroll
        for (int j = 0; j < 8; ++j) out[h][j] += weight * x[j];
      }
    }
  }

  // Adds the partial sums of all threads of a column; those of row 0 have the total.
  FE_DEVICE void add_columns() {
    float* const held = floats(layout.stages);
    const int width = kHeads * static_cast<int>(a.value_size);
    for (int count = column_rows; count > 1; count = (count + 1) / 2) {
      const int kept = (count + 1) / 2;
      __syncthreads();
      if (column_row >= kept && column_row < count) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) store8(held + (column_row - kept) * width + h * a.value_size + column_chunk * 8, out[h]);
      }
      __syncthreads();
      if (column_row < count - kept) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          float other[8];
          load8(held + column_row * width + h * a.value_size + column_chunk * 8, other);
#pragma unroll
          for (int j = 0; j < 8; ++j) out[h][j] += other[j];
        }
      }
    }
  }

  // The sum of all lanes' shares, for head lane % kHeads, in every warp.
  FE_DEVICE void add_sums() {
#pragma unroll
    for (int bits = kWarp / 2; bits >= kHeads; bits /= 2) sum += __shfl_xor_sync(kAllLanes, sum, bits);
    float* const sums = floats(layout.sums);
    if (lane_id() < kHeads) sums[warp_id() * kHeads + lane_id()] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += sums[w * kHeads + lane_id() % kHeads];
  }

  FE_DEVICE void write(const Piece& piece) {
    const int group = static_cast<int>(a.num_heads / a.num_kv_heads);
    const int64_t pieces = max_pieces(a.num_seqs, a.max_blocks * a.block_size);
    float* const statistics = a.partials + pieces * a.num_heads * a.value_size;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float head_maximum = __shfl_sync(kAllLanes, maximum, h), head_sum = __shfl_sync(kAllLanes, sum, h);
      if (piece.first_head + h >= group) break;
      const int64_t head = piece.kv_head * group + piece.first_head + h;
      if (!piece.is_only) {
        const int64_t row = piece.index * a.num_heads + head;
        if (column_row == 0) store8(a.partials + row * a.value_size + column_chunk * 8, out[h]);
        if (threadIdx.x == 0) statistics[2 * row] = head_maximum, statistics[2 * row + 1] = head_sum;
        continue;
      }
      if (column_row != 0) continue;
      float factor = 1.0f;
      if (a.sinks != nullptr) {
        const float sink = a.sinks[head] * kLog2E, top = fmaxf(sink, head_maximum);
        factor = fast_exp2(head_maximum - top);
        head_sum = head_sum * factor + fast_exp2(sink - top);
      }
      factor /= head_sum;
#pragma unroll
      for (int j = 0; j < 8; ++j) out[h][j] *= factor;
      const int64_t to = (a.query_starts[piece.seq] * a.num_heads + head) * a.value_size + column_chunk * 8;
      if (a.dtype == kBFloat16) {
        store8(static_cast<BFloat16*>(a.out) + to, out[h]);
      } else {
        store8(static_cast<Float16*>(a.out) + to, out[h]);
      }
    }
  }

  FE_DEVICE void run(const Piece& piece) {
    rows.blocks = a.block_tables + piece.seq * a.max_blocks;
    rows.head = piece.kv_head;
    maximum = kNoScore;
    sum = 0.0f;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int j = 0; j < 8; ++j) out[h][j] = 0.0f;
    }
    // Whoever is still in write() of the piece before reads nothing that is written before the next barrier.
    load_query(piece);
    fetch_id(piece, piece.begin);
    keep_id(0);
    fetch_id(piece, piece.begin + layout.tile);
    keep_id(1);
    __syncthreads();
    start_copy(piece, 0);
    const int num_tiles = static_cast<int>(ceil_div(piece.end - piece.begin, layout.tile));
    for (int t = 0; t < num_tiles; ++t) {
      copy_async_wait<0>();
      __syncthreads();
      if (t + 1 < num_tiles) start_copy(piece, t + 1);
      fetch_id(piece, piece.begin + (t + 2) * layout.tile);
      score(piece, t);
      __syncthreads();
      // Everybody has used the ids of tile t, and nobody needs those of t + 2 before the next barrier.
      keep_id(t);
      const float rescale = soften(t);
      __syncthreads();
      add_values(t, rescale);
    }
    add_columns();
    add_sums();
    write(piece);
  }
};

// Blocks that a multiprocessor's registers must hold; its shared memory seldom holds more.
constexpr int kMinBlocks[] = {4, 4, 3, 3, 3, 2, 2, 2, 2};

template <typename Cache, int kHeads>
__global__ void __launch_bounds__(kThreads, kMinBlocks[kHeads]) decode_kernel(const AttentionArgs a, const Layout layout) {
  DecodeBlock<Cache, kHeads> block(a, layout);
  const PlanView plan = plan_view(a);
  const int group = static_cast<int>(a.num_heads / a.num_kv_heads), parts = static_cast<int>(ceil_div(group, kHeads));
  const int per_piece = static_cast<int>(a.num_kv_heads) * parts;
  const int64_t total = static_cast<int64_t>(plan.num_decode()) * per_piece;
  for (int64_t work = blockIdx.x; work < total; work += gridDim.x) {
    Piece piece;
    piece.index = static_cast<int>(work / per_piece);
    const int within = static_cast<int>(work % per_piece);
    piece.kv_head = within / parts;
    piece.first_head = within % parts * kHeads;
    piece.seq = plan.piece_seqs()[piece.index];
    const int context = a.context_lens[piece.seq], start = static_cast<int>(first_visible(context - 1, a.sliding_window));
    const int length = static_cast<int>(piece_tokens(context - start));
    piece.begin = start + (piece.index - plan.decode_starts()[piece.seq]) * length;
    piece.end = smaller(context, piece.begin + length);
    piece.is_only = context - start <= length;
    block.run(piece);
  }
}

// Adds up the pieces of a sequence in their order; one warp per sequence and head.
__global__ void __launch_bounds__(kThreads) merge_kernel(const AttentionArgs a) {
  const PlanView plan = plan_view(a);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp_id();
  const int64_t seq = row / a.num_heads, head = row % a.num_heads;
  if (seq >= a.num_seqs) return;
  const int first = plan.decode_starts()[seq], count = plan.decode_starts()[seq + 1] - first;
  if (count < 2) return;
  const int64_t pieces = max_pieces(a.num_seqs, a.max_blocks * a.block_size);
  const float* const statistics = a.partials + pieces * a.num_heads * a.value_size;
  // Lane p has the statistics of piece p: there are at most 32.
  const int64_t mine = (first + smaller(lane_id(), count - 1)) * a.num_heads + head;
  const float sink = a.sinks != nullptr ? a.sinks[head] * kLog2E : kNoScore;
  const float maximum = statistics[2 * mine];
  const float top = fmaxf(warp_reduce(maximum, Maximum()), sink);
  const float factor = lane_id() < count ? fast_exp2(maximum - top) : 0.0f;
  const float sum = warp_reduce(factor * statistics[2 * mine + 1], Sum()) + (a.sinks != nullptr ? fast_exp2(sink - top) : 0.0f);
  for (int first_column = 0; first_column < a.value_size; first_column += kWarp * 8) {
    const int at = first_column + lane_id() * 8;
    float total[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int p = 0; p < count; ++p) {
      const float weight = __shfl_sync(kAllLanes, factor, p);
      if (at >= a.value_size) continue;
      float part[8];
      load8(a.partials + ((first + p) * a.num_heads + head) * a.value_size + at, part);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] += weight * part[j];
    }
    if (at >= a.value_size) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] /= sum;
    const int64_t to = (a.query_starts[seq] * a.num_heads + head) * a.value_size + at;
    if (a.dtype == kBFloat16) {
      store8(static_cast<BFloat16*>(a.out) + to, total);
    } else {
      store8(static_cast<Float16*>(a.out) + to, total);
    }
  }
}

template <typename Cache, int kHeads>
int launch_heads(const AttentionArgs& a, cudaStream_t stream) {
  // The larger tile where two blocks with it fit on a multiprocessor.
  Layout layout(a, kHeads, kMaxTile);
  if (2 * (layout.total + 1024) > multiprocessor_shared_bytes()) layout = Layout(a, kHeads, kMaxTile / 2);
  const int64_t per_multiprocessor = smaller<int64_t>(8, larger<int64_t>(1, multiprocessor_shared_bytes() / (layout.total + 1024)));
  const int64_t most = max_pieces(a.num_seqs, a.max_blocks * a.block_size) * a.num_kv_heads * ceil_div(a.num_heads / a.num_kv_heads, kHeads);
  const dim3 grid(static_cast<unsigned>(smaller(most, num_multiprocessors() * per_multiprocessor)));
  const int status = launch(decode_kernel<Cache, kHeads>, grid, dim3(kThreads), static_cast<size_t>(layout.total), stream, a, layout);
  return status != 0 ? status : launch_merge(a, stream);
}

template <typename Cache>
int launch_cache(const AttentionArgs& a, cudaStream_t stream) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  // One head does without a variant of its own: memory is the limit there by far.
  if (group <= 2) return launch_heads<Cache, 2>(a, stream);
  if (group <= 4) return launch_heads<Cache, 4>(a, stream);
  return launch_heads<Cache, 8>(a, stream);
}

}  // namespace

int launch_merge(const AttentionArgs& a, cudaStream_t stream) {
  if (a.max_blocks * a.block_size <= kMinPieceTokens) return 0;
  return launch(merge_kernel, dim3(static_cast<unsigned>(ceil_div(a.num_seqs * a.num_heads, kWarps))), dim3(kThreads), 0, stream, a);
}

int launch_decode(const AttentionArgs& a, cudaStream_t stream) {
  switch (a.cache_dtype) {
    case kBFloat16: return launch_cache<BFloat16>(a, stream);
    case kFloat16: return launch_cache<Float16>(a, stream);
    case kInt8: return launch_cache<int8_t>(a, stream);
    default: return launch_cache<Fp8E4M3>(a, stream);
  }
}

}  // namespace cuda
}  // namespace fastengine
