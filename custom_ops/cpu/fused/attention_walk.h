// What attention does whatever its cache holds: chunks, groups of rows, splits.
//
// A Kernel has
//   Kernel(in, task, rows, scratch)   takes the task's query rows
//   Chunk chunk_of(in, pieces)   where the keys and values of a chunk's pieces are
//   void prepare(chunk, next, visible)   once per chunk, before its groups; `visible` positions are written
//   group<kRows>(chunk, next, first_row, counts, masked, target)
// and group() leaves a chunk's maxima and sums in target.maxima and .sums of its rows, and adds its weighted
// values to target.out as target.fold says.
#pragma once

#include "rows.h"
#include "softmax.h"

#define FE_MEMBER inline __attribute__((always_inline))

namespace fastengine {
namespace FE_ISA {

// Where a task's query rows stand.
struct QueryRows {
  const float* first;
  int64_t heads, token_stride, head_dim;
  FE_MEMBER const float* at(int64_t row) const { return first + row / heads * token_stride + row % heads * head_dim; }
};

// A new row's queries, and its key; scratch of its rotation.
FE_INLINE int64_t new_row_floats(int64_t head_dim, int64_t rotary_dim) { return (kTaskRows + 1) * head_dim + 2 * rotary_dim; }

// Rotates the queries of a new row into `scratch`. The task that walks its last chunk stores its key and value.
FE_INLINE QueryRows take_new_row(const AttentionInput& in, const AttentionTask& task, float* scratch) {
  const NewRows& n = in.new_rows;
  const int64_t d = in.cache.head_dim, heads = in.num_heads / in.cache.num_kv_heads;
  const float* const row = in.qkv + task.first_token * in.qkv_stride;
  float *const queries = scratch, *const key = queries + kTaskRows * d;
  const Rotation rotation(n.cos_sin + n.positions[task.first_token] * n.rotary_dim, n.rotary_dim, n.interleaved, key + d);
  const auto rotate = [&](const float* source, const float* norm, float* target) {
    if (norm != nullptr) {
      norm_row(source, norm, d, n.epsilon, target);
    } else {
      for (int64_t i = 0; i < d; i += kLanes) vstore(target + i, vload(source + i));
    }
    rotation.apply(target);
  };
  const int64_t slot = n.slot_mapping[task.first_token];
  if (slot >= 0 && task.last_chunk * kChunk > task.first_position) {
    const float* const source = row + (in.num_heads + task.kv_head) * d;
    rotate(source, n.key_norm, key);
    write_kv(in.cache, slot, task.kv_head, key, source + in.cache.num_kv_heads * d);
  }
  for (int64_t h = 0; h < heads; ++h) rotate(row + (task.kv_head * heads + h) * d, n.query_norm, queries + h * d);
  return {queries, heads, 0, d};
}

// Where a group's rows of one chunk go. With a state they are folded into `out`, else `out` is overwritten
// with them, and `maxima` and `sums` are kept beside.
struct GroupTarget {
  float* maxima;  // of the state, or of the chunk
  float* sums;
  float* out;  // [rows][head_dim]
  bool folds;
};

// Factors per row for the old and new values of GroupTarget::out, and maxima and sums brought up to date.
struct RowFactors {
  alignas(64) float kept[kLanes], added[kLanes];
};

FE_INLINE void settle(const GroupTarget& target, const float* maxima, const float* sums, int64_t num_rows, RowFactors* factors) {
  const RowState chunk{vload_n(maxima, num_rows), vload_n(sums, num_rows)};
  if (!target.folds) {
    vstore_n(target.maxima, chunk.maximum, num_rows);
    vstore_n(target.sums, chunk.sum, num_rows);
    return;
  }
  RowState state{vload_n(target.maxima, num_rows), vload_n(target.sums, num_rows)};
  const Fold fold = fold_rows(&state, chunk);
  vstore_n(target.maxima, state.maximum, num_rows);
  vstore_n(target.sums, state.sum, num_rows);
  vstore(factors->kept, fold.kept);
  vstore(factors->added, fold.added);
}

FE_INLINE void put(const GroupTarget& target, const RowFactors& factors, int64_t row, Vec values, float* out) {
  vstore(out, target.folds ? vfma(values, vset(factors.added[row]), vmul(vload(out), vset(factors.kept[row]))) : values);
}

// 16 positions of one head in the cache: its row of blocks, in positions, and the first of them in its block.
struct Piece {
  int64_t base, offset;
};

FE_INLINE Piece piece_at(const AttentionInput& in, const AttentionTask& task, int64_t piece) {
  const KvLayer& c = in.cache;
  const int64_t position = piece * 16;
  const int32_t block = in.block_tables[task.seq * in.max_blocks + position / c.block_size];
  return {(block * c.num_kv_heads + task.kv_head) * c.block_size, position % c.block_size};
}

// Pieces that a task walks.
FE_INLINE int64_t first_piece_of(const AttentionTask& task) { return task.first_chunk * (kChunk / 16); }
FE_INLINE int64_t end_piece_of(const AttentionTask& task) { return min_i(task.last_chunk * (kChunk / 16), ceil_div(task.first_position + task.num_queries, 16)); }

// The `num_pieces` pieces of chunk `chunk`. Those behind repeat the last one: they are read, but count for nothing.
FE_INLINE void pieces_of_chunk(const AttentionInput& in, const AttentionTask& task, int64_t chunk, int64_t num_pieces, Piece* out) {
  for (int64_t i = 0; i < kChunk / 16; ++i) out[i] = i < num_pieces ? piece_at(in, task, chunk * (kChunk / 16) + i) : out[num_pieces - 1];
}

// What a thread will walk kAhead pieces after what it has in hand, whichever task that belongs to. For each piece that
// it works on it asks for one of these: a short chunk, which is soon over, for few, and a long one for many.
class PiecesAhead {
 public:
  static constexpr int64_t kAhead = kChunk / 16;

  FE_MEMBER PiecesAhead(const AttentionInput& in, const AttentionTask* task, const AttentionTask* end) : in_(in), task_(task), end_(end), piece_(first_piece_of(*task) + kAhead) {
    settle();
  }

  // The next `num_pieces`, filled up as in pieces_of_chunk().
  FE_MEMBER void take(int64_t num_pieces, Piece* out) {
    for (int64_t i = 0; i < kChunk / 16; ++i) {
      out[i] = i < num_pieces ? piece_at(in_, *task_, piece_) : out[num_pieces - 1];
      if (i < num_pieces) ++piece_, settle();
    }
  }

 private:
  // From behind a task's pieces into the tasks after it; behind the last one's nothing new is asked for.
  FE_MEMBER void settle() {
    for (int64_t last = end_piece_of(*task_); piece_ >= last; last = end_piece_of(*task_)) {
      if (task_ + 1 == end_) {
        piece_ = last - 1;
        return;
      }
      piece_ += first_piece_of(*++task_) - last;
    }
  }

  const AttentionInput& in_;
  const AttentionTask *task_, *end_;
  int64_t piece_;
};

template <typename Kernel>
FE_INLINE void walk_rows(Kernel& kernel, int64_t num_rows, const typename Kernel::Chunk& chunk, const typename Kernel::Chunk& next, int64_t first, const int64_t* counts,
                         bool masked, const GroupTarget& target) {
  switch (num_rows) {
    case 1: return kernel.template group<1>(chunk, next, first, counts, masked, target);
    case 2: return kernel.template group<2>(chunk, next, first, counts, masked, target);
    case 3: return kernel.template group<3>(chunk, next, first, counts, masked, target);
    case 4: return kernel.template group<4>(chunk, next, first, counts, masked, target);
    case 5: return kernel.template group<5>(chunk, next, first, counts, masked, target);
    default: return kernel.template group<6>(chunk, next, first, counts, masked, target);
  }
}

// Writes the rows' outputs, divided by their sums.
FE_INLINE void finish(const AttentionInput& in, const AttentionTask& task, const float* sums, const float* out) {
  const int64_t d = in.cache.head_dim, heads = in.num_heads / in.cache.num_kv_heads;
  for (int64_t r = 0; r < task.num_queries * heads; ++r) {
    float* const target = in.out + (task.first_row + r / heads) * in.num_heads * d + (task.kv_head * heads + r % heads) * d;
    const Vec inverse = vset(1.0f / sums[r]);
    for (int64_t i = 0; i < d; i += kLanes) vstore(target + i, vmul(vload(out + r * d + i), inverse));
  }
}

// Folds the results of all chunks, as a single walk would have done.
FE_INLINE void fold_split(const AttentionInput& in, const AttentionTask& task, const float* partials, int64_t num_chunks, float* out) {
  const int64_t d = in.cache.head_dim, num_rows = task.num_queries * (in.num_heads / in.cache.num_kv_heads);
  alignas(64) float maxima[kTaskRows], sums[kTaskRows];
  for (int64_t r = 0; r < kTaskRows; ++r) maxima[r] = -3.0e38f, sums[r] = 0.0f;
  for (int64_t i = 0; i < num_rows * d; i += kLanes) vstore(out + i, vzero());
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk, partials += partial_floats(num_rows, d)) {
    for (int64_t first = 0; first < num_rows; first += kLanes) {
      const int64_t n = min_i(kLanes, num_rows - first);
      const GroupTarget target{maxima + first, sums + first, out + first * d, true};
      RowFactors factors;
      settle(target, partials + first, partials + kTaskRows + first, n, &factors);
      for (int64_t r = 0; r < n; ++r) {
        const float* const values = partials + 2 * kTaskRows + (first + r) * d;
        for (int64_t i = 0; i < d; i += kLanes) put(target, factors, r, vload(values + i), target.out + r * d + i);
      }
    }
  }
  finish(in, task, sums, out);
}

// scratch: the rows' output [kTaskRows][head_dim], a new row, then the kernel's own.
template <typename Kernel>
FE_INLINE void walk(const AttentionInput& in, const AttentionTask* tasks, const AttentionTask* end_of_tasks, void* scratch) {
  const AttentionTask& task = *tasks;
  const int64_t d = in.cache.head_dim, heads = in.num_heads / in.cache.num_kv_heads, num_rows = task.num_queries * heads;
  float* const out = static_cast<float*>(scratch);
  float *const new_row = out + kTaskRows * d, *const own = new_row + new_row_floats(d, in.new_rows.rotary_dim);
  const QueryRows rows = task.is_new != 0 ? take_new_row(in, task, new_row)
                                          : QueryRows{in.qkv + task.first_token * in.qkv_stride + task.kv_head * heads * d, heads, in.qkv_stride, d};
  Kernel kernel(in, task, rows, own);
  alignas(64) float maxima[kTaskRows], sums[kTaskRows];
  const bool is_split = task.split >= 0;
  for (int64_t r = 0; r < kTaskRows; ++r) maxima[r] = -3.0e38f, sums[r] = 0.0f;
  if (!is_split) {
    for (int64_t i = 0; i < num_rows * d; i += kLanes) vstore(out + i, vzero());
  }
  float* const partials = is_split ? in.partials + in.splits[task.split].partials_at : nullptr;
  const int64_t end = task.first_position + task.num_queries;
  PiecesAhead pieces_ahead(in, tasks, end_of_tasks);
  for (int64_t i = task.first_chunk; i < task.last_chunk; ++i) {
    const int64_t begin = i * kChunk, visible = min_i(kChunk, end - begin), num_pieces = ceil_div(visible, 16);
    Piece pieces[kChunk / 16];
    pieces_of_chunk(in, task, i, num_pieces, pieces);
    const typename Kernel::Chunk chunk = kernel.chunk_of(in, pieces);
    pieces_ahead.take(num_pieces, pieces);
    const typename Kernel::Chunk next = kernel.chunk_of(in, pieces);
    kernel.prepare(chunk, next, visible);
    float* const results = partials + i * partial_floats(num_rows, d);
    for (int64_t first = 0; first < num_rows; first += kGroupRows) {
      const int64_t n = min_i(kGroupRows, num_rows - first);
      int64_t counts[kGroupRows];
      for (int64_t r = 0; r < n; ++r) counts[r] = max_i(0, min_i(kChunk, task.first_position + (first + r) / heads + 1 - begin));
      const GroupTarget target = is_split ? GroupTarget{results + first, results + kTaskRows + first, results + 2 * kTaskRows + first * d, false}
                                          : GroupTarget{maxima + first, sums + first, out + first * d, true};
      // A row that sees nothing of this chunk folds in zeros; a group that sees nothing has nothing to fold.
      if (counts[n - 1] > 0 || is_split) walk_rows(kernel, n, chunk, next, first, counts, counts[0] < visible, target);
    }
  }
  if (!is_split) {
    finish(in, task, sums, out);
    return;
  }
  const AttentionSplit& split = in.splits[task.split];
  if (__atomic_add_fetch(in.arrived + task.split, 1, __ATOMIC_ACQ_REL) != static_cast<uint32_t>(split.num_tasks)) return;
  fold_split(in, task, partials, split.num_chunks, out);
}

}  // namespace FE_ISA
}  // namespace fastengine
