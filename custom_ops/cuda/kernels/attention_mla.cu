// Decode attention over the latent cache of multi-head latent attention (DeepSeek-V2, 2024) on the tensor cores:
// every head reads the same row of 512 + 64 values as its key, and the first 512 of it as its value.
//
// Target: 85 % of copy bandwidth for up to 32 heads, from 4k context and 16 sequences on; with more heads the
// rows come from the L2 cache again for every 32 of them, and the products are the limit.
//
// A block of four warps takes pieces (range of one sequence's context, 32 heads) until none is left, and goes
// through a piece 32 tokens at a time:
//
//   scores   warp w has tokens 8 w .. 8 w + 7, for all heads         -> shared memory
//   softmax  four lanes have one head: warp w has heads 8 w ..       -> weights, and factors for earlier output
//   values   warp w has columns 128 w .. 128 w + 127, for all heads
//
// With memory for two stages the next tokens are copied under the products; else another block's products
// cover the copy. Rows in shared memory are padded by 16 bytes.
#include "attention.h"
#include "device/numeric.h"
#include "device/reduce.h"
#include "device/tensor_core.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeadSize = 576, kValueSize = 512;
constexpr int kHeads = 32;   // of a block
constexpr int kTokens = 32;  // of a step
constexpr int kColumns = kValueSize / kWarps;
constexpr int kRow = kHeadSize + 8;        // elements
constexpr int kScoreRow = kTokens + 2;     // floats
constexpr int kWeightRow = kTokens + 8;    // elements
// Shared memory, in bytes.
constexpr int kScores = 2 * kHeads * kRow;
constexpr int kWeights = kScores + 4 * kHeads * kScoreRow;
constexpr int kFactors = kWeights + 2 * kHeads * kWeightRow;
constexpr int kStages = kFactors + 2 * 4 * kHeads;
constexpr int kStageBytes = 2 * kTokens * kRow;
static_assert(kStages % 16 == 0, "copies are 16 bytes");

struct Piece {
  int seq, index;
  int first_head;
  int begin, end;  // tokens
  bool is_only;    // the sequence has no other
};

template <typename T>
struct LatentBlock {
  const AttentionArgs& a;
  const int num_stages;
  unsigned char* const shared;
  PagedRows rows;
  float maximum, sum;  // of the head of this lane's group of four
  float out[2][kColumns / 8][4];

  FE_DEVICE LatentBlock(const AttentionArgs& args, int stages) : a(args), num_stages(stages), shared(dynamic_shared()), rows{nullptr, 0, 1, log2_of(args.block_size)} {}

  FE_DEVICE uint16_t* elements(int at) const { return reinterpret_cast<uint16_t*>(shared + at); }
  FE_DEVICE float* floats(int at) const { return reinterpret_cast<float*>(shared + at); }
  FE_DEVICE uint16_t* latent(int tile) const { return elements(kStages + tile % num_stages * kStageBytes); }

  FE_DEVICE void copy_queries(const Piece& piece) {
    constexpr int kChunks = kHeadSize / 8;
    const int64_t token = a.query_starts[piece.seq];
    for (int i = static_cast<int>(threadIdx.x); i < kHeads * kChunks; i += kThreads) {
      const int head = piece.first_head + i / kChunks, at = i % kChunks * 8;
      const bool valid = head < a.num_heads;
      const T* const from = static_cast<const T*>(a.query) + token * a.query_stride + (valid ? head : 0) * static_cast<int64_t>(kHeadSize) + at;
      copy_async_16(elements(0) + i / kChunks * kRow + at, from, valid);
    }
  }

  FE_DEVICE void start_copy(const Piece& piece, int tile) {
    constexpr int kChunks = kHeadSize / 8;
    uint16_t* const to = latent(tile);
    // Not unrolled whole: the output leaves few registers for addresses.
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * kChunks; i += kThreads) {
      const int row = i / kChunks, at = i % kChunks * 8, token = piece.begin + tile * kTokens + row;
      const bool valid = token < piece.end;
      const int64_t from = valid ? rows.row_in(rows.blocks[token >> rows.shift], token) : 0;
      copy_async_16(to + row * kRow + at, static_cast<const T*>(a.key_cache) + from * kHeadSize + at, valid);
    }
    copy_async_commit();
  }

  // Scores of this warp's tokens for all heads, in units of log2; kNoScore past the end.
  FE_DEVICE void score(const Piece& piece, int tile) {
    const int lane = lane_id();
    const uint16_t* const query = elements(0) + lane % 16 * kRow + lane / 16 * 8;
    // The keys of two products in one load: tokens by lane % 8, eight values by lane / 8.
    const uint16_t* const key = latent(tile) + (warp_id() * 8 + lane % 8) * kRow + lane / 8 * 8;
    float s[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll 3
    for (int k = 0; k < kHeadSize; k += 32) {
      uint32_t b[4];
      load_matrices(b, key + k);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        uint32_t q[4];
        load_matrices(q, query + m * 16 * kRow + k);
        mma_16x8x16<T>(s[m], q, b[0], b[1]);
        load_matrices(q, query + m * 16 * kRow + k + 16);
        mma_16x8x16<T>(s[m], q, b[2], b[3]);
      }
    }
    const int token = warp_id() * 8 + 2 * (lane % 4), first = piece.begin + tile * kTokens + token;
    const float scale = a.scale * kLog2E;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const to = floats(kScores) + (m * 16 + lane / 4 + 8 * r) * kScoreRow + token;
        to[0] = first < piece.end ? s[m][2 * r] * scale : kNoScore;
        to[1] = first + 1 < piece.end ? s[m][2 * r + 1] * scale : kNoScore;
      }
    }
  }

  FE_DEVICE void soften() {
    const int head = static_cast<int>(threadIdx.x) / 4, first = static_cast<int>(threadIdx.x) % 4 * 8;
    float s[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) s[j] = floats(kScores)[head * kScoreRow + first + j];
    float largest = maximum;
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, s[j]);
    largest = warp_reduce<4>(largest, Maximum());
    const float rescale = fast_exp2(maximum - largest);
    maximum = largest;
    sum *= rescale;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      s[j] = fast_exp2(s[j] - largest);
      sum += s[j];
    }
    store8(reinterpret_cast<T*>(elements(kWeights)) + head * kWeightRow + first, s);
    if (first == 0) floats(kFactors)[head] = rescale;
  }

  FE_DEVICE void add_values(int tile) {
    const int lane = lane_id();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = floats(kFactors)[m * 16 + lane / 4 + 8 * r];
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) out[m][n][2 * r] *= factor, out[m][n][2 * r + 1] *= factor;
      }
    }
    const uint16_t* const weight = elements(kWeights) + lane % 16 * kWeightRow + lane / 16 * 8;
    const uint16_t* const value = latent(tile) + lane % 16 * kRow + warp_id() * kColumns + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kTokens; k += 16) {
      uint32_t w[2][4];
      load_matrices(w[0], weight + k);
      load_matrices(w[1], weight + 16 * kWeightRow + k);
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, value + k * kRow + n * 16);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_16x8x16<T>(out[m][2 * n], w[m], b[0], b[1]);
          mma_16x8x16<T>(out[m][2 * n + 1], w[m], b[2], b[3]);
        }
      }
    }
  }

  FE_DEVICE void write(const Piece& piece) {
    const int lane = lane_id();
    float* const maxima = floats(kFactors);
    float* const sums = maxima + kHeads;
    sum = warp_reduce<4>(sum, Sum());
    // The last factors may still be in use.
    __syncthreads();
    if (lane % 4 == 0) maxima[threadIdx.x / 4] = maximum, sums[threadIdx.x / 4] = sum;
    __syncthreads();
    float* const statistics = a.partials + max_pieces(a.num_seqs, a.max_blocks * a.block_size) * a.num_heads * kValueSize;
    const int64_t token = a.query_starts[piece.seq];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + lane / 4 + 8 * r, head = piece.first_head + row;
        if (head >= a.num_heads) continue;
        const int column = warp_id() * kColumns + 2 * (lane % 4);
        if (piece.is_only) {
          const float factor = 1.0f / sums[row];
          T* const to = static_cast<T*>(a.out) + (token * a.num_heads + head) * kValueSize + column;
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) *reinterpret_cast<uint32_t*>(to + 8 * n) = pack2<T>(out[m][n][2 * r] * factor, out[m][n][2 * r + 1] * factor);
          continue;
        }
        const int64_t part = piece.index * a.num_heads + head;
        float* const to = a.partials + part * kValueSize + column;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) *reinterpret_cast<float2*>(to + 8 * n) = make_float2(out[m][n][2 * r], out[m][n][2 * r + 1]);
        if (column == 0) statistics[2 * part] = maxima[row], statistics[2 * part + 1] = sums[row];
      }
    }
  }

  FE_DEVICE void run(const Piece& piece) {
    rows.blocks = a.block_tables + piece.seq * a.max_blocks;
    maximum = kNoScore;
    sum = 0.0f;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.0f;
    }
    // Whoever is still in write() of the piece before reads nothing that is written before the next barrier.
    copy_queries(piece);
    start_copy(piece, 0);
    const int num_tiles = static_cast<int>(ceil_div(piece.end - piece.begin, kTokens));
    for (int t = 0; t < num_tiles; ++t) {
      copy_async_wait<0>();
      __syncthreads();
      if (num_stages > 1 && t + 1 < num_tiles) start_copy(piece, t + 1);
      score(piece, t);
      __syncthreads();
      soften();
      __syncthreads();
      add_values(t);
      if (num_stages == 1 && t + 1 < num_tiles) {
        __syncthreads();
        start_copy(piece, t + 1);
      }
    }
    write(piece);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 2) latent_decode_kernel(const AttentionArgs a, int num_stages) {
  LatentBlock<T> block(a, num_stages);
  const PlanView plan = plan_view(a);
  const int parts = static_cast<int>(ceil_div(a.num_heads, kHeads));
  const int64_t total = static_cast<int64_t>(plan.num_decode()) * parts;
  for (int64_t work = blockIdx.x; work < total; work += gridDim.x) {
    Piece piece;
    // The parts of a piece are neighbours: all but the first find its rows in the cache.
    piece.index = static_cast<int>(work / parts);
    piece.first_head = static_cast<int>(work % parts) * kHeads;
    piece.seq = plan.piece_seqs()[piece.index];
    const int context = a.context_lens[piece.seq], length = static_cast<int>(piece_tokens(context));
    piece.begin = (piece.index - plan.decode_starts()[piece.seq]) * length;
    piece.end = smaller(context, piece.begin + length);
    piece.is_only = context <= length;
    block.run(piece);
  }
}

bool supported(const AttentionArgs& a) {
  const bool types = (a.dtype == kBFloat16 || a.dtype == kFloat16) && a.cache_dtype == a.dtype;
  const bool sizes = a.head_size == kHeadSize && a.value_size == kValueSize && a.num_kv_heads == 1 && a.query_stride % 8 == 0;
  const bool plain = a.sliding_window == 0 && a.sinks == nullptr && a.key_scale == nullptr && a.value_scale == nullptr;
  return types && sizes && plain && a.num_heads > 0 && a.block_size >= 8 && (a.block_size & (a.block_size - 1)) == 0;
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(mla_decode, AttentionArgs) {
  using namespace fastengine::cuda;
  const AttentionArgs& a = *args;
  if (!supported(a)) return kUnsupported;
  if (a.num_tokens == 0) return 0;
  const int most = multiprocessor_shared_bytes() - 1024;
  const int stages = kStages + 2 * kStageBytes <= most ? 2 : 1, bytes = kStages + stages * kStageBytes;
  const int64_t per_multiprocessor = larger(1, multiprocessor_shared_bytes() / (bytes + 1024));
  const int64_t work = max_pieces(a.num_seqs, a.max_blocks * a.block_size) * ceil_div(a.num_heads, kHeads);
  const dim3 grid(static_cast<unsigned>(smaller(work, num_multiprocessors() * per_multiprocessor)));
  const auto kernel = a.dtype == kBFloat16 ? latent_decode_kernel<BFloat16> : latent_decode_kernel<Float16>;
  const int status = launch(kernel, grid, dim3(kThreads), static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream), a, stages);
  return status != 0 ? status : launch_merge(a, static_cast<cudaStream_t>(stream));
}
