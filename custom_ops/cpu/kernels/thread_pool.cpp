#include "thread_pool.h"

#include <errno.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

namespace fastengine {
namespace {

// How long a worker looks for the next job before it parks. It bridges the gap between two operators
// of a step; longer would take the core away from the thread that prepares the next operator.
constexpr auto kSpin = std::chrono::microseconds(15);

void pause_cpu() { _mm_pause(); }

// Called where a thread has no task in hand. Another process that waits for this core gets it here, while the other threads
// do this one's share, and not in the middle of a task, for whose end they all would wait. Costs a system call's 0.3
// microseconds when nobody waits.
void let_others_run() { sched_yield(); }

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>* word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// A job is announced by its sequence number in `announced_`. Workers enter through `inside_` and take
// task indices from `next_`; the caller works too, closes the job when no index is left, and waits
// until nobody is inside. A worker that wakes late finds the job closed and goes back to waiting.
class ThreadPool {
 public:
  void resize(int num_threads) {
    std::lock_guard<std::mutex> lock(jobs_);
    wanted_.store(num_threads < 1 ? 1 : num_threads, std::memory_order_relaxed);
  }

  int size() const { return wanted_.load(std::memory_order_relaxed); }

  void run(int64_t num_tasks, TaskFunction function, void* context) {
    std::lock_guard<std::mutex> lock(jobs_);
    start_workers();
    function_ = function;
    context_ = context;
    num_tasks_ = num_tasks;
    next_.store(0, std::memory_order_relaxed);
    helpers_.store(static_cast<int>(std::min<int64_t>(num_tasks, size())) - 1, std::memory_order_relaxed);
    open_.store(true, std::memory_order_seq_cst);
    announced_.fetch_add(1, std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst) > 0) futex_wake(&announced_, size() - 1);
    let_others_run();
    take_tasks();
    open_.store(false, std::memory_order_seq_cst);
    wait_for_helpers();
  }

  // After fork() only the calling thread exists in the child.
  void forget_workers() {
    new (&jobs_) std::mutex();
    started_ = 0;
    parked_.store(0);
    inside_.store(0);
    open_.store(false);
  }

 private:
  void start_workers() {
    for (; started_ < size() - 1; ++started_) std::thread([this] { serve(); }).detach();
  }

  void take_tasks() {
    for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < num_tasks_; i = next_.fetch_add(1, std::memory_order_relaxed)) {
      function_(context_, i);
    }
  }

  // A helper that the scheduler put aside may hold the last task: let it have this core after a while.
  void wait_for_helpers() {
    for (int spins = 0; inside_.load(std::memory_order_seq_cst) != 0; ++spins) {
      if (spins < 2000) {
        pause_cpu();
      } else {
        sched_yield();
      }
    }
  }

  void serve() {
    uint32_t seen = 0;
    for (;;) {
      seen = wait_for_job(seen);
      let_others_run();
      inside_.fetch_add(1, std::memory_order_seq_cst);
      // More workers than this job wants (after the pool was made smaller) stay out.
      if (open_.load(std::memory_order_seq_cst) && helpers_.fetch_sub(1, std::memory_order_relaxed) > 0) take_tasks();
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  uint32_t wait_for_job(uint32_t seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; ++i) {
        const uint32_t now = announced_.load(std::memory_order_acquire);
        if (now != seen) return now;
        pause_cpu();
      }
    } while (std::chrono::steady_clock::now() < until);
    parked_.fetch_add(1, std::memory_order_seq_cst);
    while (announced_.load(std::memory_order_seq_cst) == seen) futex_wait(&announced_, seen);
    parked_.fetch_sub(1, std::memory_order_relaxed);
    return announced_.load(std::memory_order_acquire);
  }

  std::mutex jobs_;
  int started_ = 0;
  std::atomic<int> wanted_{1};
  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> announced_{0};
  std::atomic<int> parked_{0};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<int> helpers_{0};
  std::atomic<bool> open_{false};
};

// Never destroyed: its workers may still be parked when static destructors run.
ThreadPool& pool() {
  static ThreadPool* const instance = [] {
    auto* created = new ThreadPool();
    pthread_atfork(nullptr, nullptr, [] { pool().forget_workers(); });
    return created;
  }();
  return *instance;
}

}  // namespace

void set_num_threads(int num_threads) { pool().resize(num_threads); }

int num_threads() { return pool().size(); }

void run_tasks(int64_t num_tasks, TaskFunction function, void* context) { pool().run(num_tasks, function, context); }

void* thread_scratch(int64_t num_bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> block;
  thread_local int64_t capacity = 0;
  if (num_bytes > capacity) {
    const int64_t wanted = (num_bytes + 4095) / 4096 * 4096;
    block.reset(std::aligned_alloc(64, static_cast<size_t>(wanted)));
    if (block == nullptr) throw std::bad_alloc();
    capacity = wanted;
  }
  return block.get();
}

}  // namespace fastengine
