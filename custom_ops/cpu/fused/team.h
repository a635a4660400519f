// The threads of one step: a spin barrier, and tasks handed out by a counter per phase.
//
// A step enters the thread pool once and stays in it; phases are separated by barriers of a tenth of a
// microsecond. GCC's atomic builtins instead of std::atomic: kernels must leave no weak symbols.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <cstdint>

namespace fastengine {
namespace fused {

struct alignas(64) TaskCounter {
  int64_t next;
};

struct Team {
  int num_threads;
  TaskCounter* counters;  // one per phase, zero at the start
  alignas(64) int32_t arrived;
  alignas(64) uint32_t generation;
};

struct Member {
  Team* team;
  int index;
  int64_t phase;
};

static inline __attribute__((always_inline, unused)) void barrier(const Member& me) {
  Team& team = *me.team;
  if (team.num_threads == 1) return;
  const uint32_t before = __atomic_load_n(&team.generation, __ATOMIC_RELAXED);
  if (__atomic_add_fetch(&team.arrived, 1, __ATOMIC_ACQ_REL) == team.num_threads) {
    __atomic_store_n(&team.arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team.generation, before + 1, __ATOMIC_RELEASE);
    return;
  }
  // A partner that lost its core to another process may need ours to come back.
  for (int spins = 0; __atomic_load_n(&team.generation, __ATOMIC_ACQUIRE) == before; ++spins) {
    if (spins < 20000) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

// Calls body(first, last) over ranges of [0, num_tasks) that this member took, then waits for all.
template <typename Body>
static inline __attribute__((always_inline, unused)) void for_tasks(Member& me, int64_t num_tasks, int64_t grain, const Body& body) {
  int64_t* const next = &me.team->counters[me.phase++].next;
  for (;;) {
    const int64_t first = __atomic_fetch_add(next, grain, __ATOMIC_RELAXED);
    if (first >= num_tasks) break;
    body(first, first + grain < num_tasks ? first + grain : num_tasks);
  }
  barrier(me);
}

}  // namespace fused
}  // namespace fastengine
