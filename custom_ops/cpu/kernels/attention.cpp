// Paged attention over a ragged batch: lays out the tasks of all sequences, then runs them as one job.
#include "attention.h"

#include <stdlib.h>

#include "launchers.h"

namespace fastengine {
namespace FE_ISA {
namespace {

struct Task {
  int32_t seq;
  int32_t part;          // split of a decode, tile of a prefill
  int64_t first_partial; // of the sequence's decode partials; -1: prefill
};

struct Plan {
  Task* tasks;  // one per part; each runs once per KV head
  float* partials;
  int64_t num_tasks, num_partials, work;
};

int64_t query_length(const AttentionArgs& a, int64_t seq) { return a.query_starts[seq + 1] - a.query_starts[seq]; }

// Two walks over the sequences: one counts, one fills. A single buffer serves both arrays; it is not
// thread_scratch(), which the tasks run by this thread use.
Plan make_plan(const AttentionArgs& a) {
  Plan plan{nullptr, nullptr, 0, 0, 0};
  const int64_t per_key = 2 * a.num_heads * (a.head_size + a.value_size);
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t length = query_length(a, s);
    if (length == 0) continue;
    const int64_t splits = length == 1 ? decode_splits(a, s) : 0;
    plan.num_partials += splits;
    plan.num_tasks += length == 1 ? splits : prefill_tiles(a, s);
    plan.work += per_key * length * a.context_lens[s];
  }
  const int64_t partial_floats = plan.num_partials * a.num_kv_heads * decode_partial_size(a);
  const size_t task_bytes = static_cast<size_t>(ceil_div(plan.num_tasks * static_cast<int64_t>(sizeof(Task)), 64) * 64);
  void* buffer = nullptr;
  if (posix_memalign(&buffer, 64, task_bytes + static_cast<size_t>(partial_floats) * sizeof(float) + 64) != 0) abort();
  plan.tasks = static_cast<Task*>(buffer);
  plan.partials = reinterpret_cast<float*>(static_cast<char*>(buffer) + task_bytes);
  int64_t n = 0, first_partial = 0;
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const int64_t length = query_length(a, s);
    if (length == 0) continue;
    const int64_t parts = length == 1 ? decode_splits(a, s) : prefill_tiles(a, s);
    for (int64_t p = 0; p < parts; ++p) {
      // A prefill's last tiles see the most keys: start them first, so that no thread ends with one.
      const int64_t part = length == 1 ? p : parts - 1 - p;
      plan.tasks[n++] = {static_cast<int32_t>(s), static_cast<int32_t>(part), length == 1 ? first_partial : -1};
    }
    if (length == 1) first_partial += parts;
  }
  return plan;
}

}  // namespace

void paged_attention(const AttentionArgs& args) {
  const Plan plan = make_plan(args);
  const int64_t size = decode_partial_size(args);
  // Partials of a sequence and KV head lie together: [sequence's first split][KV head][split].
  const auto partial_at = [&](const Task& task, int64_t head, int64_t splits) {
    return plan.partials + (task.first_partial * args.num_kv_heads + head * splits) * size;
  };
  parallel_for(plan.num_tasks * args.num_kv_heads, plan.work, [&](int64_t i) {
    const Task& task = plan.tasks[i / args.num_kv_heads];
    const int64_t head = i % args.num_kv_heads;
    if (task.first_partial < 0) {
      prefill_task(args, task.seq, head, task.part);
      return;
    }
    const int64_t splits = decode_splits(args, task.seq);
    float* const partials = partial_at(task, head, splits);
    decode_task(args, task.seq, head, task.part, partials + task.part * size);
    if (splits == 1) merge_decode(args, task.seq, head, partials, 1);
  });
  for (int64_t i = 0; i < plan.num_tasks; ++i) {
    const Task& task = plan.tasks[i];
    if (task.first_partial < 0 || task.part != 0) continue;
    const int64_t splits = decode_splits(args, task.seq);
    if (splits == 1) continue;
    for (int64_t head = 0; head < args.num_kv_heads; ++head) merge_decode(args, task.seq, head, partial_at(task, head, splits), splits);
  }
  free(plan.tasks);
}

}  // namespace FE_ISA
}  // namespace fastengine
