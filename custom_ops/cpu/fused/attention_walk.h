// What attention does whatever its cache holds: chunks, groups of rows, splits.
//
// A Kernel has
//   Kernel(in, scratch)
//   bool take_finished(in, task)   takes the task's query rows as QKV finished them, if it did
//   void take(in, queries, num_rows)   else takes them as floats, rotated
//   Chunk   where the keys and values of a chunk's pieces are
//   void place(in, piece, i, chunk)   makes `piece` the chunk's number i
//   void prepare(chunk, next, visible)   once per chunk, before its groups; `visible` positions are written
//   group<kRows>(chunk, next, request, target)
// and group() brings target.maxima, .sums and .out of its rows up to date with what the chunk gives, as target.use says.
#pragma once

#include "rows.h"
#include "softmax.h"

#define FE_MEMBER inline __attribute__((always_inline))

namespace fastengine {
namespace FE_ISA {

// Scratch of rotation: a key row and what Rotation needs.
FE_INLINE int64_t rotation_floats(int64_t head_dim, int64_t rotary_dim) { return head_dim + 2 * rotary_dim; }

// Rotates a task's queries into `rows` [query][head][head_dim]. Of a new token, the task that walks its last chunk stores
// its key and value.
FE_INLINE void take_queries(const AttentionInput& in, const AttentionTask& task, float* scratch, float* rows) {
  const NewRows& n = in.new_rows;
  const int64_t d = in.cache.head_dim, heads = in.num_heads / in.cache.num_kv_heads;
  const auto rotate = [&](const Rotation& rotation, const float* source, const float* norm, float* target) {
    if (norm != nullptr) norm_row(source, norm, d, n.epsilon, target), source = target;
    rotation.apply(source, target);
    for (int64_t i = n.rotary_dim; source != target && i < d; ++i) target[i] = source[i];
  };
  for (int64_t t = 0; t < task.num_queries; ++t) {
    const int64_t token = task.first_token + t, slot = n.slot_mapping[token];
    const float* const row = in.qkv + token * in.qkv_stride;
    const Rotation rotation(n.cos_sin + n.positions[token] * n.rotary_dim, n.rotary_dim, n.interleaved, scratch + d);
    if (task.is_new != 0 && slot >= 0 && task.last_chunk * kChunk > task.first_position) {
      const float* const source = row + (in.num_heads + task.kv_head) * d;
      rotate(rotation, source, n.key_norm, scratch);
      write_kv(in.cache, slot, task.kv_head, scratch, source + in.cache.num_kv_heads * d);
    }
    for (int64_t h = 0; h < heads; ++h) rotate(rotation, row + (task.kv_head * heads + h) * d, n.query_norm, rows + (t * heads + h) * d);
  }
}

// Asks for what take_queries() reads and writes of a new token.
FE_INLINE void expect_new(const AttentionInput& in, const AttentionTask& task) {
  const int64_t d = in.cache.head_dim, heads = in.num_heads / in.cache.num_kv_heads;
  const float* const row = in.qkv + task.first_token * in.qkv_stride;
  const auto ask = [](const float* p, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(p + i);
  };
  ask(row + task.kv_head * heads * d, heads * d);
  ask(row + (in.num_heads + task.kv_head) * d, d);
  ask(row + (in.num_heads + in.cache.num_kv_heads + task.kv_head) * d, d);
  const int64_t slot = in.new_rows.slot_mapping[task.first_token];
  if (slot >= 0 && task.last_chunk * kChunk > task.first_position) expect_kv(in.cache, slot, task.kv_head);
}

// What becomes of a chunk's results: they are kept beside others, begin the rows' state, or are folded into it.
enum class Use { kKeep, kBegin, kFold };

// Where a group's rows of one chunk go: maxima and sums, and weighted values [rows][head_dim].
struct GroupTarget {
  Use use;
  float *maxima, *sums, *out;
};

// Factors per row for the old and new values of GroupTarget::out, and -kMagic times the latter.
struct RowFactors {
  alignas(64) float kept[kLanes], added[kLanes], offset[kLanes];
};

// Brings the maxima and sums of a target's rows up to date.
FE_INLINE void settle(const GroupTarget& target, RowState chunk, int64_t num_rows, RowFactors* factors) {
  if (target.use == Use::kFold) {
    RowState state{vload_n(target.maxima, num_rows), vload_n(target.sums, num_rows)};
    const Fold fold = fold_rows(&state, chunk);
    vstore(factors->kept, fold.kept);
    vstore(factors->added, fold.added);
    vstore(factors->offset, vmul(fold.added, vset(-kMagic)));
    chunk = state;
  } else {
    vstore(factors->added, vset(1.0f));
    vstore(factors->offset, vset(-kMagic));
  }
  vstore_n(target.maxima, chunk.maximum, num_rows);
  vstore_n(target.sums, chunk.sum, num_rows);
}

FE_INLINE void put(const GroupTarget& target, const RowFactors& factors, int64_t row, Vec scaled, float* out) {
  vstore(out, target.use == Use::kFold ? vfma(vload(out), vset(factors.kept[row]), scaled) : scaled);
}

// 16 positions of one head in the cache: its row of blocks, in positions, and the first of them in its block.
struct Piece {
  int64_t base, offset;
};

// A task's pieces, one after the other.
class PieceWalk {
 public:
  FE_MEMBER PieceWalk(const AttentionInput& in, const AttentionTask& task, int64_t piece) : in_(in) { seek(task, piece); }
  FE_MEMBER void seek(const AttentionTask& task, int64_t piece) {
    const uint32_t position = static_cast<uint32_t>(piece * 16), block_size = static_cast<uint32_t>(in_.cache.block_size);
    block_ = in_.block_tables + task.seq * in_.max_blocks + position / block_size;
    offset_ = position % block_size;
    head_ = task.kv_head;
  }
  FE_MEMBER Piece current() const { return {(*block_ * in_.cache.num_kv_heads + head_) * in_.cache.block_size, offset_}; }
  FE_MEMBER Piece take() {
    const Piece piece = current();
    offset_ += 16;
    if (offset_ == in_.cache.block_size) offset_ = 0, ++block_;
    return piece;
  }

 private:
  const AttentionInput& in_;
  const int32_t* block_;
  int64_t offset_, head_;
};

// Pieces that a task walks.
FE_INLINE int64_t first_piece_of(const AttentionTask& task) { return task.first_chunk * (kChunk / 16); }
FE_INLINE int64_t end_piece_of(const AttentionTask& task) { return min_i(task.last_chunk * (kChunk / 16), ceil_div(task.first_position + task.num_queries, 16)); }

// The next `num_pieces` pieces of a walk. Those behind repeat the last one: they are read, but count for nothing.
// One piece at a time, and not copied: vectors of what was just written in parts are read only when the processor is done with
// all that it wrote before, and that is a row of keys, in 16 cache lines that it must get first.
template <typename Kernel, typename Next>
FE_INLINE void fill_chunk(const Kernel& kernel, const AttentionInput& in, int64_t num_pieces, const Next& next_piece, typename Kernel::Chunk* out) {
  Piece piece{0, 0};
  for (int64_t i = 0; i < kChunk / 16; ++i) {
    if (i < num_pieces) piece = next_piece();
    kernel.place(in, piece, i, out);
  }
}

// What a thread will walk kAhead pieces after what it has in hand, whichever task that belongs to. For each piece that
// it works on it asks for one of these: a short chunk, which is soon over, for few, and a long one for many.
class PiecesAhead {
 public:
  static constexpr int64_t kAhead = 2 * kChunk / 16;

  FE_MEMBER PiecesAhead(const AttentionInput& in, const AttentionTask* task, const AttentionTask* end)
      : walk_(in, *task, 0), task_(task), end_(end), piece_(first_piece_of(*task) + kAhead), last_(end_piece_of(*task)) {
    settle();
  }

  FE_MEMBER Piece take() {
    const Piece piece = walk_.take();
    if (++piece_ == last_) settle();
    return piece;
  }

 private:
  // From behind a task's pieces into the tasks after it; behind the last one's nothing new is asked for.
  FE_MEMBER void settle() {
    for (; piece_ >= last_ && task_ + 1 != end_; last_ = end_piece_of(*task_)) piece_ += first_piece_of(*++task_) - last_;
    piece_ = min_i(piece_, last_ - 1);
    walk_.seek(*task_, piece_);
  }

  PieceWalk walk_;
  const AttentionTask *task_, *end_;
  int64_t piece_, last_;
};

// A group of rows from `first` on, each of which sees `counts` positions of the chunk; masked: not all of them all.
struct GroupRequest {
  int64_t first;
  const int64_t* counts;
  bool masked, asks_ahead;
};

template <typename Kernel>
FE_INLINE void walk_rows(Kernel& kernel, int64_t num_rows, const typename Kernel::Chunk& chunk, const typename Kernel::Chunk& next, const GroupRequest& request, const GroupTarget& target) {
  switch (num_rows) {
    case 1: return kernel.template group<1>(chunk, next, request, target);
    case 2: return kernel.template group<2>(chunk, next, request, target);
    case 3: return kernel.template group<3>(chunk, next, request, target);
    case 4: return kernel.template group<4>(chunk, next, request, target);
    case 5: return kernel.template group<5>(chunk, next, request, target);
    default: return kernel.template group<6>(chunk, next, request, target);
  }
}

// What is known of a task's rows.
struct TaskState {
  alignas(64) float maxima[kTaskRows], sums[kTaskRows];
};

// Divides the rows' outputs by their sums and hands them on.
FE_INLINE void finish(const AttentionInput& in, const AttentionTask& task, const float* sums, float* out) {
  const int64_t d = in.cache.head_dim, heads = in.num_heads / in.cache.num_kv_heads, features = heads * d, first_feature = task.kv_head * features;
  const int64_t group = in.context.group_blocks * kBlockK;
  WholeTiles whole{0, 0};
  if (quantizes_tiles(in.context.num_rows, features)) whole = whole_tiles(task.first_row, task.num_queries, in.context.num_rows);
  for (int64_t t = 0; t < task.num_queries; ++t) {
    const int64_t row = task.first_row + t, tile = row / kTileRows;
    float* const source = out + t * features;
    float* const target = tile >= whole.first && tile < whole.last ? source : in.out + row * in.num_heads * d + first_feature;
    for (int64_t h = 0; h < heads; ++h, ++sums) {
      const Vec inverse = vset(1.0f / *sums);
      for (int64_t i = h * d; i < h * d + d; i += kLanes) vstore(target + i, vmul(vload(source + i), inverse));
    }
  }
  for (int64_t tile = whole.first; tile < whole.last; ++tile) {
    const TileSource rows{out + (tile * kTileRows - task.first_row) * features, features, first_feature, in.num_heads * d, nullptr, {}};
    quantize_tile(rows, tile, first_feature / group, (first_feature + features) / group, in.context);
  }
}

// Folds the results of all chunks, as a single walk would have done.
FE_INLINE void fold_split(const AttentionInput& in, const AttentionTask& task, const float* partials, int64_t num_chunks, float* out) {
  const int64_t d = in.cache.head_dim, num_rows = task.num_queries * (in.num_heads / in.cache.num_kv_heads), padded = padded_rows(num_rows);
  TaskState state;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk, partials += partial_floats(num_rows, d)) {
    for (int64_t first = 0; first < num_rows; first += kLanes) {
      const int64_t n = min_i(kLanes, num_rows - first);
      const GroupTarget target{chunk == 0 ? Use::kBegin : Use::kFold, state.maxima + first, state.sums + first, out + first * d};
      RowFactors factors;
      settle(target, {vload_n(partials + first, n), vload_n(partials + padded + first, n)}, n, &factors);
      for (int64_t r = 0; r < n; ++r) {
        const float* const values = partials + 2 * padded + (first + r) * d;
        for (int64_t i = 0; i < d; i += kLanes) put(target, factors, r, vmul(vload(values + i), vset(factors.added[r])), target.out + r * d + i);
      }
    }
  }
  finish(in, task, state.sums, out);
}

// scratch: the rows' queries and outputs [kTaskRows][head_dim], what rotation needs, then the kernel's own.
template <typename Kernel>
FE_INLINE void walk(const AttentionInput& in, const AttentionTask* tasks, const AttentionTask* end_of_tasks, void* scratch) {
  const AttentionTask& task = *tasks;
  const int64_t d = in.cache.head_dim, heads = in.num_heads / in.cache.num_kv_heads, num_rows = task.num_queries * heads, padded = padded_rows(num_rows);
  float *const queries = static_cast<float*>(scratch), *const out = queries + kTaskRows * d, *const own = out + kTaskRows * d;
  Kernel kernel(in, own + rotation_floats(d, in.new_rows.rotary_dim));
  if (!kernel.take_finished(in, task)) {
    take_queries(in, task, own, queries);
    if (tasks + 1 != end_of_tasks && tasks[1].is_new != 0) expect_new(in, tasks[1]);
    kernel.take(in, queries, num_rows);
  }
  TaskState state;
  const bool is_split = task.split >= 0;
  float* const partials = is_split ? in.partials + in.splits[task.split].partials_at : nullptr;
  const int64_t end = task.first_position + task.num_queries;
  PiecesAhead pieces_ahead(in, tasks, end_of_tasks);
  for (int64_t i = task.first_chunk; i < task.last_chunk; ++i) {
    const int64_t begin = i * kChunk, visible = min_i(kChunk, end - begin), num_pieces = ceil_div(visible, 16);
    typename Kernel::Chunk chunk, next;
    PieceWalk pieces(in, task, i * (kChunk / 16));
    fill_chunk(kernel, in, num_pieces, [&]() __attribute__((always_inline)) { return pieces.take(); }, &chunk);
    fill_chunk(kernel, in, num_pieces, [&]() __attribute__((always_inline)) { return pieces_ahead.take(); }, &next);
    kernel.prepare(chunk, next, visible);
    float* const results = partials + i * partial_floats(num_rows, d);
    for (int64_t first = 0, query = 0, head = 0; first < num_rows; first += kGroupRows) {
      const int64_t n = min_i(kGroupRows, num_rows - first);
      int64_t counts[kGroupRows];
      for (int64_t r = 0; r < n; ++r) {
        counts[r] = max_i(0, min_i(kChunk, task.first_position + query + 1 - begin));
        if (++head == heads) head = 0, ++query;
      }
      // Whoever sees all that is written of the chunk asks for the next one.
      const GroupRequest request{first, counts, counts[0] < visible, first + n == num_rows};
      const GroupTarget target = is_split ? GroupTarget{Use::kKeep, results + first, results + padded + first, results + 2 * padded + first * d}
                                          : GroupTarget{i == 0 ? Use::kBegin : Use::kFold, state.maxima + first, state.sums + first, out + first * d};
      // A row that sees nothing of this chunk folds in zeros; a group that sees nothing has nothing to fold.
      if (counts[n - 1] > 0 || is_split) walk_rows(kernel, n, chunk, next, request, target);
    }
  }
  if (!is_split) {
    finish(in, task, state.sums, out);
    return;
  }
  const AttentionSplit& split = in.splits[task.split];
  if (__atomic_add_fetch(in.arrived + task.split, 1, __ATOMIC_ACQ_REL) != static_cast<uint32_t>(split.num_tasks)) return;
  fold_split(in, task, partials, split.num_chunks, out);
}

}  // namespace FE_ISA
}  // namespace fastengine
