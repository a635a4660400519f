#include "heads.h"

#include "rows.h"

namespace fastengine {
namespace FE_ISA {
namespace {

// A tile of rows of one head.
struct HeadTile {
  alignas(64) float rows[kTileRows * kMostHeadDim];
  int32_t tokens[kTileRows], slots[kTileRows];
};

FE_INLINE int64_t token_of(const int32_t* tokens, int64_t row) { return tokens != nullptr ? tokens[row] : row; }

FE_INLINE void rotate_tile(const NewRows& n, const float* norm, int64_t d, int64_t count, HeadTile* tile) {
  alignas(64) float scratch[2 * kMostHeadDim];
  for (int64_t r = 0; r < count; ++r) {
    float* const row = tile->rows + r * d;
    const Rotation rotation(n.cos_sin + n.positions[tile->tokens[r]] * n.rotary_dim, n.rotary_dim, n.interleaved, scratch);
    if (norm != nullptr) norm_row(row, norm, d, n.epsilon, row);
    rotation.apply(row, row);
  }
}

}  // namespace

void expect_head(const HeadTarget& target, int64_t head, const int32_t* tokens, int64_t first, int64_t num_rows) {
  const KvLayer& c = target.cache;
  const int64_t d = c.head_dim, kv_head = (head - target.num_heads) % c.num_kv_heads;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int8_t* line = target.queries.values + (head * target.queries.num_rows + first + r) * d;
    if (head >= target.num_heads) {
      // Of 16 rows, which follow each other as a rule, each asks for lines of a piece of its own.
      const int64_t slot = target.rows.slot_mapping[token_of(tokens, first + r)], offset = slot % c.block_size;
      if (slot < 0) continue;
      const bool is_key = head < target.num_heads + c.num_kv_heads;
      line = static_cast<const int8_t*>(is_key ? c.key : c.value) + (slot / c.block_size * c.num_kv_heads + kv_head) * c.block_size * d;
      line += is_key ? offset / 16 * 64 + offset % 16 * c.block_size * 4 : offset * d;
    }
    for (int64_t i = 0; i < d; i += 64) __builtin_prefetch(line + i, 1);
  }
}

void finish_head(const HeadTarget& target, int64_t head, const int32_t* tokens, int64_t first, int64_t num_rows, const float (*panels)[kChunkRows * kPanel]) {
  const KvLayer& c = target.cache;
  const NewRows& n = target.rows;
  const FinishedQueries& q = target.queries;
  const int64_t d = c.head_dim, kv_head = head - target.num_heads;
  for (int64_t begin = 0; begin < num_rows; begin += kTileRows) {
    const int64_t count = min_i(kTileRows, num_rows - begin);
    HeadTile tile;
    for (int64_t r = 0; r < count; ++r) {
      tile.tokens[r] = static_cast<int32_t>(token_of(tokens, first + begin + r));
      tile.slots[r] = n.slot_mapping[tile.tokens[r]];
      for (int64_t i = 0; i < d; i += kLanes) vstore(tile.rows + r * d + i, vload(panels[i / kPanel] + (begin + r) * kPanel + i % kPanel));
    }
    if (kv_head >= c.num_kv_heads) {
      write_values(c, tile.slots, count, kv_head - c.num_kv_heads, tile.rows);
      continue;
    }
    rotate_tile(n, kv_head < 0 ? n.query_norm : n.key_norm, d, count, &tile);
    if (kv_head >= 0) {
      write_keys(c, tile.slots, count, kv_head, tile.rows);
    } else {
      const int64_t at = head * q.num_rows + first + begin;
      quantize_queries(tile.rows, count, d, target.score_scale, q.values + at * d, q.scales + at, q.starts + at);
    }
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
