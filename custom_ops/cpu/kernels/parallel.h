// Runs a lambda over task indices, in parallel when the work is worth waking a thread for.
#pragma once

#include "simd.h"
#include "thread_pool.h"

namespace fastengine {
namespace FE_ISA {

// Waking a parked worker costs tens of microseconds, a spinning one well under one: below this many
// floating-point operations (some 5 us of one thread) the caller works alone.
constexpr int64_t kMinParallelWork = 100000;

template <typename Body>
static void run_body(void* context, int64_t index) {
  (*static_cast<Body*>(context))(index);
}

// Calls body(i) for i in [0, num_tasks). `work` estimates the whole job's floating-point operations.
template <typename Body>
static void parallel_for(int64_t num_tasks, int64_t work, Body body) {
  if (num_tasks <= 1 || work < kMinParallelWork || num_threads() == 1) {
    for (int64_t i = 0; i < num_tasks; ++i) body(i);
    return;
  }
  run_tasks(num_tasks, &run_body<Body>, &body);
}

// Calls body(begin, end) over ranges that cover [0, num_items), each with about the same work.
template <typename Body>
static void parallel_ranges(int64_t num_items, int64_t work_per_item, Body body) {
  const int64_t grain = max_i(1, kMinParallelWork / 4 / max_i(1, work_per_item));
  const int64_t num_ranges = max_i(1, min_i(ceil_div(num_items, grain), 4 * static_cast<int64_t>(num_threads())));
  parallel_for(num_ranges, num_items * work_per_item, [&](int64_t i) {
    body(num_items * i / num_ranges, num_items * (i + 1) / num_ranges);
  });
}

}  // namespace FE_ISA
}  // namespace fastengine
