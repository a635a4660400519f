// What the prefill kernels share: a tile of query rows, the softmax over a step's scores, and the output.
//
// Rows lie in registers as the matrix instructions leave them (mma and wgmma alike): lane l of warp w has rows
// 16 m + l / 4 and + 8 of the warp's own, columns 8 n + 2 (l % 4) and + 1. So four lanes have a row.
#pragma once

#include "attention.h"
#include "device/numeric.h"

namespace fastengine {
namespace cuda {

// On the scales of 8-bit values while they multiply weights, so that products with small weights stay
// normal numbers in float16; taken off at the end. The largest, 65504 / 127 * 64, still fits.
constexpr float kScaleShift = 64.0f;

struct Tile {
  int seq, kv_head;
  int first_token;     // of the sequence's query rows
  int num_rows;        // rows in use
  int first_position;  // of the first token
  int begin, end;      // context that some row sees
};

// The piece of work of a block: late tiles see the longest context, so they start first. False: there is none.
FE_DEVICE bool tile_of_block(const AttentionArgs& a, Tile* tile) {
  const PlanView plan = plan_view(a);
  const int index = plan.num_tiles() - 1 - static_cast<int>(blockIdx.x);
  if (index < 0) return false;
  const int group = static_cast<int>(a.num_heads / a.num_kv_heads), per_tile = static_cast<int>(tile_tokens(group));
  tile->seq = plan.tile_seqs()[index];
  tile->kv_head = static_cast<int>(blockIdx.y);
  tile->first_token = (index - plan.tile_starts()[tile->seq]) * per_tile;
  const int length = a.query_starts[tile->seq + 1] - a.query_starts[tile->seq];
  const int tokens = smaller(per_tile, length - tile->first_token);
  tile->num_rows = tokens * group;
  tile->first_position = a.context_lens[tile->seq] - length + tile->first_token;
  tile->begin = static_cast<int>(first_visible(tile->first_position, a.sliding_window));
  tile->end = tile->first_position + tokens;
  return true;
}

// One block for each tile there may be and KV head.
inline dim3 grid_of_tiles(const AttentionArgs& a) {
  return dim3(static_cast<unsigned>(max_tiles(a.num_seqs, a.num_tokens, a.num_heads / a.num_kv_heads)), static_cast<unsigned>(a.num_kv_heads));
}

// The rows of a warp. C: T, kValue, kStep (tokens), kRowTiles (of 16 rows), kWidest (elements of a staged row of output).
template <typename C>
struct TileRows {
  using T = typename C::T;
  const AttentionArgs& a;
  const Tile tile;
  unsigned char* const shared;
  const int group;
  const PagedRows rows;
  float out[C::kRowTiles][C::kValue / 8][4];
  float scores[C::kRowTiles][C::kStep / 8][4];
  float maximum[C::kRowTiles][2], sum[C::kRowTiles][2];  // of rows lane / 4 and lane / 4 + 8

  FE_DEVICE TileRows(const AttentionArgs& args, const Tile& mine, unsigned char* memory)
      : a(args),
        tile(mine),
        shared(memory),
        group(static_cast<int>(args.num_heads / args.num_kv_heads)),
        rows{args.block_tables + mine.seq * args.max_blocks, mine.kv_head, args.num_kv_heads, log2_of(args.block_size)} {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      maximum[m][0] = maximum[m][1] = kNoScore;
      sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
      for (int n = 0; n < C::kValue / 8; ++n) out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.0f;
    }
  }

  FE_DEVICE uint16_t* elements(int at) const { return reinterpret_cast<uint16_t*>(shared + at); }
  FE_DEVICE bool is_expanded() const { return a.cache_dtype != a.dtype; }
  FE_DEVICE int position(int row) const { return tile.first_position + row / group; }
  // Steps in between are seen whole by every row.
  FE_DEVICE int whole_begin() const { return static_cast<int>(first_visible(position(tile.num_rows - 1), a.sliding_window)); }
  FE_DEVICE int whole_end() const { return tile.first_position + 1; }

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

  // The weights as operands of T, times the step's scales of values if there are any: half the registers of the scores.
  FE_DEVICE void pack(const float* scales, uint32_t (&weights)[C::kRowTiles][C::kStep / 16][4]) const {
    const float* const scale = scales + 2 * (lane_id() % 4);
#pragma unroll
    for (int n = 0; n < C::kStep / 8; ++n) {
      float low = 1.0f, high = 1.0f;
      if (scales != nullptr) low = scale[8 * n], high = scale[8 * n + 1];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        const float(&s)[4] = scores[m][n];
        weights[m][n / 2][n % 2 * 2] = pack2<T>(s[0] * low, s[1] * high);
        weights[m][n / 2][n % 2 * 2 + 1] = pack2<T>(s[2] * low, s[3] * high);
      }
    }
  }

  // Divides by the sums and writes the warp's rows, by way of its own of kTileRows rows of `staging`.
  FE_DEVICE void write(uint16_t* staging) {
    const int lane = lane_id(), first_row = warp_id() * C::kRowTiles * 16;
    uint16_t* const held = staging + first_row * C::kWidest;
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
};

}  // namespace cuda
}  // namespace fastengine
