// A small pool of std::thread workers for the CPU operators, without OpenMP.
#pragma once

#include <cstdint>

namespace fastengine {

// One task of a parallel job; `index` is in [0, num_tasks).
using TaskFunction = void (*)(void* context, int64_t index);

// The number of threads that run a job, the calling one included. Takes effect with the next job.
// Values below 1 mean 1.
void set_num_threads(int num_threads);
int num_threads();

// Calls function(context, i) once for every i, on up to num_threads() threads, and returns when all
// are done. Tasks must not throw, and must not start jobs. Which thread runs a task is not
// determined: a result must not depend on it. Jobs of several callers run one after the other.
void run_tasks(int64_t num_tasks, TaskFunction function, void* context);

// Scratch memory of the calling thread, at least num_bytes, 64-byte aligned, content undefined. It is
// reused by the thread's next call, and never shrinks.
void* thread_scratch(int64_t num_bytes);

}  // namespace fastengine
