// Which attention tasks a step has, for how many threads.
#pragma once

#include "attention.h"

namespace fastengine {
namespace FE_ISA {

constexpr int64_t kTasksPerThread = 4;  // of about equal cost, at least, where splitting can give them

// Cost of a task: chunks times groups of rows.
FE_INLINE int64_t cost_of(int64_t num_queries, int64_t heads, int64_t num_chunks) { return ceil_div(num_queries * heads, kGroupRows) * num_chunks; }

// Whether the rows that sample are last tokens of their sequences, in order, and fewer than all rows: then the others can
// be left out where nothing but what samples is wanted.
FE_INLINE bool samples_end_sequences(const StepArgs& s) {
  int64_t row = 0;
  for (int64_t i = 0; i < s.num_seqs && row < s.num_samples; ++i) row += s.query_starts[i + 1] - 1 == s.sample_rows[row] ? 1 : 0;
  return s.num_samples < s.num_tokens && row == s.num_samples;
}

// How many queries are walked together: the fewer, the more often keys are read and made ready; the more, the fewer tasks.
FE_INLINE int64_t queries_per_task(const ModelShape& shape, const StepArgs& s, int num_threads) {
  const int64_t heads = shape.num_heads / shape.num_kv_heads;
  int64_t rows = kTaskRows;
  while (rows > kTaskRows / 4 && s.num_tokens * shape.num_heads / rows < 2 * kTasksPerThread * num_threads) rows /= 2;
  return max_i(1, rows / heads);
}

// Calls visit(seq, first query, num_queries, num_chunks, row) for each run of queries that are walked together; `row` is the
// first one's among all, or with `samples_only`, where there are no others, among those that sample.
// Runs come in as many parts as there are threads, which are about the rows that each thread has. The last queries of a prefill see
// the most keys: they come first of their part, so that no thread ends with one.
template <typename Visit>
FE_INLINE void for_query_runs(const ModelShape& shape, const StepArgs& s, int num_threads, bool samples_only, const Visit& visit) {
  const int64_t per_task = queries_per_task(shape, s, num_threads);
  for (int64_t i = 0, row = 0; i < s.num_seqs; ++i) {
    const int64_t length = s.query_starts[i + 1] - s.query_starts[i], start = s.context_lens[i] - length;
    if (samples_only) {
      if (row == s.num_samples || s.sample_rows[row] != s.query_starts[i + 1] - 1) continue;
      visit(i, length - 1, 1, ceil_div(start + length, kChunk), row++);
      continue;
    }
    const int64_t num_runs = ceil_div(length, per_task);
    for (int64_t part = 0; part < num_threads; ++part) {
      for (int64_t t = num_runs * (part + 1) / num_threads - 1; t >= num_runs * part / num_threads; --t) {
        const int64_t first = t * per_task, count = min_i(per_task, length - first);
        visit(i, first, count, ceil_div(start + first + count, kChunk), s.query_starts[i] + first);
      }
    }
  }
}

// Where splits, tasks and partial results go, or with null pointers how many there are.
struct AttentionPlan {
  AttentionTask* tasks;
  AttentionSplit* splits;
  int64_t num_tasks, num_splits, num_partials;
  int32_t* stored;  // [num_stored]: tokens whose keys and values attention does not store itself
  int64_t num_stored;
  int32_t* loose;  // [num_loose] of num_tiles, which attention leaves to be quantized
  int64_t num_loose, num_tiles;
};

// A run of queries is split over several tasks where it would hold up the other threads. That changes who
// computes a chunk, and no result: see attention.h.
FE_INLINE void plan_attention(const ModelShape& shape, const StepArgs& s, int num_threads, bool samples_only, AttentionPlan* plan) {
  const int64_t kv_heads = shape.num_kv_heads, heads = shape.num_heads / kv_heads;
  int64_t total = 0;
  for_query_runs(shape, s, num_threads, samples_only, [&](int64_t, int64_t, int64_t count, int64_t chunks, int64_t) { total += kv_heads * cost_of(count, heads, chunks); });
  const int64_t share = max_i(1, total / (kTasksPerThread * num_threads));
  const int64_t num_rows = samples_only ? s.num_samples : s.num_tokens;
  plan->num_tasks = plan->num_splits = plan->num_partials = 0;
  plan->num_loose = plan->num_tiles = ceil_div(num_rows, kTileRows);
  for (int64_t tile = 0; plan->loose != nullptr && tile < plan->num_tiles; ++tile) plan->loose[tile] = static_cast<int32_t>(tile);
  for_query_runs(shape, s, num_threads, samples_only, [&](int64_t seq, int64_t first, int64_t count, int64_t chunks, int64_t row) {
    const int64_t parts = num_threads == 1 ? 1 : min_i(chunks, ceil_div(2 * cost_of(count, heads, chunks), 3 * share));
    const bool is_new = s.query_starts[seq + 1] - s.query_starts[seq] == 1;
    const int64_t token = s.query_starts[seq] + first, position = s.context_lens[seq] - (s.query_starts[seq + 1] - s.query_starts[seq]) + first;
    const WholeTiles whole = whole_tiles(row, count, num_rows);
    for (int64_t tile = whole.first; quantizes_tiles(num_rows, heads * shape.head_dim) && tile < whole.last; ++tile, --plan->num_loose) {
      if (plan->loose != nullptr) plan->loose[tile] = -1;
    }
    for (int64_t head = 0; head < kv_heads; ++head) {
      const int64_t split = parts > 1 ? plan->num_splits++ : -1;
      if (split >= 0) {
        if (plan->splits != nullptr) plan->splits[split] = {plan->num_partials, static_cast<int32_t>(parts), static_cast<int32_t>(chunks)};
        plan->num_partials += chunks * partial_floats(count * heads, shape.head_dim);
      }
      for (int64_t part = 0; part < parts; ++part, ++plan->num_tasks) {
        if (plan->tasks == nullptr) continue;
        plan->tasks[plan->num_tasks] = {static_cast<int32_t>(token), static_cast<int32_t>(count), static_cast<int32_t>(position), static_cast<int32_t>(head), static_cast<int32_t>(seq),
                                        static_cast<int32_t>(part * chunks / parts), static_cast<int32_t>((part + 1) * chunks / parts), static_cast<int32_t>(split), is_new, static_cast<int32_t>(row)};
      }
    }
  });
  for (int64_t tile = 0, to = 0; plan->loose != nullptr && tile < plan->num_tiles; ++tile) {
    if (plan->loose[tile] >= 0) plan->loose[to++] = plan->loose[tile];
  }
  plan->num_stored = 0;
  for (int64_t i = 0, row = 0; i < s.num_seqs; ++i) {
    const int32_t first = s.query_starts[i], last = s.query_starts[i + 1] - 1;
    const bool samples = row < s.num_samples && s.sample_rows[row] == last;
    row += samples ? 1 : 0;
    if (first == last && (samples || !samples_only)) continue;
    for (int32_t t = first; t <= last; ++t, ++plan->num_stored) {
      if (plan->stored != nullptr) plan->stored[plan->num_stored] = t;
    }
  }
}

}  // namespace FE_ISA
}  // namespace fastengine
