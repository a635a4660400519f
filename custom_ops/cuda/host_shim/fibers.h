// Runs one CUDA-style grid on the CPU: every thread of a block is a fiber, and barriers really wait.
//
//   launch --> for each block, in shuffled order
//                every thread runs until it waits or ends; who runs next is drawn at random
//                nobody can run and somebody waits  -->  the launch fails, naming who waits where
//
// Between two waits a thread is never interrupted, so a missing barrier shows as a wrong result under
// some order, not under all: run a test with several seeds. Ordering between blocks, memory ordering
// and interruption between two instructions are out of reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace fastengine {
namespace shim {

struct Index3 {
  unsigned x, y, z;
};

struct Site {
  const char* file;
  int line;
};

// What one lane brings to an operation of its warp. Operations derive from it and add their operands.
struct Collective {
  const char* name;
  uint32_t mask;
  Site site;
  // Runs once when every lane of `mask` is there; lanes outside it are null.
  void (*complete)(Collective* const lanes[32]);
};

// A copy into shared memory that happens when it is waited for, not when it is issued.
struct PendingCopy {
  void* target;
  const void* source;
  size_t bytes;
  size_t valid;  // bytes past these become zero
};

struct Thread {
  Index3 index;
  unsigned linear;
  void* stack_pointer;
  enum class State { ready, at_block_barrier, at_warp_operation, done } state;
  Site site;
  Collective* operation;
  std::vector<PendingCopy> open_copies;
  std::vector<std::vector<PendingCopy>> committed_copies;
  // Of asynchronous matrix products (warpgroup.h).
  bool products_begun = false;
  unsigned open_products = 0, committed_products = 0;
  std::vector<std::function<void()>> late_products;      // of a warp, with its first lane
  std::map<float*, std::vector<float>> sums_under_way;   // by the place of the sums
  std::vector<size_t> unpublished;                       // 16-byte chunks of shared memory that it copied
};

// The running thread and its block; valid inside a kernel only.
extern Thread* current;
extern Index3 block_index, block_dim, grid_dim;
// What the emulated device has for all blocks of a multiprocessor.
extern int multiprocessor_shared_bytes;

void block_barrier(Site site);
// Whether the barrier at this place is left out (fe_shim_skip_barrier).
bool is_skipped(Site site);
void warp_operation(Collective* mine);
void commit_copies();
void wait_copies(size_t groups_left_open);
// Ends the launch with a message; never returns into the kernel.
[[noreturn]] void fail(const std::string& message, Site site);

// Shared memory of the running block, filled with 0xff; ends at an unmapped page.
void* dynamic_shared();
size_t dynamic_shared_bytes();
// What asynchronous copies left in a chunk is unseen by matrix products until the thread that copied publishes it.
bool is_published(size_t chunk);
void publish_copies();
// Whether products started now compute at once or when they are waited for: either may happen.
bool products_are_early();
// Static shared memory: one area per `key` and block.
void* static_shared(const void* key, size_t bytes);

constexpr int kFailed = -2;
// Returns 0, or kFailed with error_message() set: what the emulated device would not launch fails as well. `address`
// is the kernel's, which fe_shim_launched tells.
int run_grid(Index3 grid, Index3 block, size_t shared_bytes, const void* address, const std::function<void()>& kernel);

}  // namespace shim
}  // namespace fastengine

extern "C" {
// 0 runs threads in order, 1 in reverse, any other value seeds a random order.
void fe_shim_set_schedule(uint64_t seed);
// Kernels choose their tiles by it: 228 KiB (sm_90) unless set. A block gets at most 1 KiB less.
void fe_shim_set_multiprocessor_shared(int bytes);
// The addresses of the kernels launched since the last call, at most `most`; returns how many there are.
uint64_t fe_shim_launched(const void** addresses, uint64_t most);
// Leaves out the __syncthreads or __syncwarp of this file (its name without folders) and line, as if it were
// deleted: tests of a kernel have to notice. A null file leaves out none.
void fe_shim_skip_barrier(const char* file, int line);
// How often threads have passed the barrier left out.
uint64_t fe_shim_skipped();
// Why the last launch failed; empty if it did not.
const char* fe_shim_error();
}
