// The threads of one step: counters of each phase hand out tasks, another counts those that are done.
//
// Every thread has a part of a phase's tasks, the same part each time, so that it reads memory from front
// to back and asks ahead for what it will need; who is through with his own takes from the others.
//
// A step enters the thread pool once and stays in it. A phase is over when its tasks are done, not when
// every thread has been there: one that lost its core to another process holds nobody up unless it has a
// task in hand, and runs through the finished phases when it is back. A thread that waits longer than a
// task should take sleeps, so that the system can move the one it waits for to the core it leaves.
// GCC's atomic builtins instead of std::atomic: kernels must leave no weak symbols.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace fastengine {
namespace fused {

constexpr uint64_t kSpinCycles = 60000;  // about 25 microseconds

struct Phase {
  alignas(64) uint32_t done;  // waited for as a futex
  int32_t sleeping;
};

// What one thread's part of a phase has given out.
struct Part {
  alignas(64) int64_t taken;
};

struct Team {
  int num_threads;
  Phase* phases;  // all zero at the start
  Part* parts;    // [phases][num_threads], all zero at the start
};

struct Member {
  Team* team;
  int index;
  int64_t phase;
};

static inline __attribute__((always_inline, unused)) void futex(uint32_t* word, int operation, uint32_t value) {
  syscall(SYS_futex, word, operation, value, nullptr, nullptr, 0);
}

static inline __attribute__((always_inline, unused)) void wait_until_done(Phase* phase, uint32_t num_tasks) {
  uint32_t done = __atomic_load_n(&phase->done, __ATOMIC_ACQUIRE);
  for (const uint64_t start = __rdtsc(); done != num_tasks && __rdtsc() - start < kSpinCycles;) {
    _mm_pause();
    done = __atomic_load_n(&phase->done, __ATOMIC_ACQUIRE);
  }
  if (done == num_tasks) return;
  __atomic_add_fetch(&phase->sleeping, 1, __ATOMIC_SEQ_CST);
  for (done = __atomic_load_n(&phase->done, __ATOMIC_SEQ_CST); done != num_tasks; done = __atomic_load_n(&phase->done, __ATOMIC_SEQ_CST)) {
    futex(&phase->done, FUTEX_WAIT_PRIVATE, done);
  }
  __atomic_sub_fetch(&phase->sleeping, 1, __ATOMIC_SEQ_CST);
}

// Calls body(first, last) over ranges of [0, num_tasks) that this member took, then waits for the others'.
template <typename Body>
static inline __attribute__((always_inline, unused)) void for_tasks(Member& me, int64_t num_tasks, int64_t grain, const Body& body) {
  const int64_t num_parts = me.team->num_threads;
  Phase* const phase = me.team->phases + me.phase;
  Part* const parts = me.team->parts + me.phase++ * num_parts;
  uint32_t mine = 0;
  for (int64_t i = 0, part = me.index; i < num_parts; ++i, part = part + 1 == num_parts ? 0 : part + 1) {
    const int64_t begin = num_tasks * part / num_parts, end = num_tasks * (part + 1) / num_parts;
    for (;;) {
      if (__atomic_load_n(&parts[part].taken, __ATOMIC_RELAXED) >= end - begin) break;
      const int64_t first = begin + __atomic_fetch_add(&parts[part].taken, grain, __ATOMIC_RELAXED);
      if (first >= end) break;
      const int64_t last = first + grain < end ? first + grain : end;
      body(first, last);
      mine += static_cast<uint32_t>(last - first);
    }
  }
  const uint32_t all = static_cast<uint32_t>(num_tasks);
  if (mine != 0 && __atomic_add_fetch(&phase->done, mine, __ATOMIC_SEQ_CST) == all) {
    if (__atomic_load_n(&phase->sleeping, __ATOMIC_SEQ_CST) != 0) futex(&phase->done, FUTEX_WAKE_PRIVATE, 1u << 30);
    return;
  }
  wait_until_done(phase, all);
}

}  // namespace fused
}  // namespace fastengine
