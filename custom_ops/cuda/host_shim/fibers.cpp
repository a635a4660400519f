#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace fastengine {
namespace shim {

Thread* current = nullptr;
Index3 block_index, block_dim, grid_dim;
int multiprocessor_shared_bytes = 228 * 1024;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr unsigned kMaxThreads = 1024;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

char* map_pages(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<char*>(memory);
}

// Stacks side by side, each above an unmapped page.
class Stacks {
 public:
  Stacks() : base_(map_pages(kMaxThreads * kStackBytes)) {
    for (unsigned i = 0; i < kMaxThreads; ++i) mprotect(base_ + i * kStackBytes, page_bytes(), PROT_NONE);
  }
  char* lowest(unsigned thread) { return base_ + thread * kStackBytes + page_bytes(); }
  char* top(unsigned thread) { return base_ + (thread + 1) * kStackBytes; }

 private:
  char* base_;
};

Stacks& stacks() {
  static Stacks all;
  return all;
}

// ---- switching -------------------------------------------------------------------------------------

#if defined(__x86_64__)

extern "C" void fe_shim_switch(void** save, void* load);
asm(R"(
.text
.globl fe_shim_switch
.type fe_shim_switch,@function
fe_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fe_shim_switch,.-fe_shim_switch
)");

void* new_context(unsigned thread, void (*entry)()) {
  uintptr_t top = reinterpret_cast<uintptr_t>(stacks().top(thread)) & ~uintptr_t{15};
  void** slot = reinterpret_cast<void**>(top);
  *--slot = nullptr;                           // the entry function never returns
  *--slot = reinterpret_cast<void*>(entry);    // rsp is 8 mod 16 at its first instruction, as after a call
  for (int i = 0; i < 6; ++i) *--slot = nullptr;
  return slot;
}

void switch_context(void** save, void* load) { fe_shim_switch(save, load); }

#else

ucontext_t contexts[kMaxThreads + 1];

void* new_context(unsigned thread, void (*entry)()) {
  ucontext_t* const context = &contexts[thread];
  getcontext(context);
  context->uc_stack.ss_sp = stacks().lowest(thread);
  context->uc_stack.ss_size = kStackBytes - page_bytes();
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

void switch_context(void** save, void* load) {
  if (*save == nullptr) *save = &contexts[kMaxThreads];
  swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(load));
}

#endif

// ---- one block -------------------------------------------------------------------------------------

enum class Order { forward, reverse, random };

class Block {
 public:
  Block(unsigned num_threads, Index3 dim, Order order, std::mt19937_64* random) : order_(order), random_(random), threads_(num_threads) {
    for (unsigned i = 0; i < num_threads; ++i) {
      Thread& t = threads_[i];
      t.index = {i % dim.x, i / dim.x % dim.y, i / (dim.x * dim.y)};
      t.linear = i;
      t.state = Thread::State::ready;
      t.operation = nullptr;
      wake(t);
    }
  }

  void run(const std::function<void()>& kernel);
  void arrive_at_barrier(Site site);
  void arrive_at_operation(Collective* mine);
  void leave() { switch_context(&current->stack_pointer, scheduler_); }
  void stop(const std::string& message) {
    message_ = message;
    leave();
  }
  const std::string& message() const { return message_; }
  const std::function<void()>& kernel() const { return *kernel_; }

 private:
  // Who may run: one bit each for the fixed orders, a list to draw from for the random one.
  bool anybody_ready() const {
    return !ready_.empty() || std::any_of(std::begin(ready_bits_), std::end(ready_bits_), [](uint64_t word) { return word != 0; });
  }
  Thread& next() {
    if (order_ == Order::random) {
      const size_t at = (*random_)() % ready_.size();
      const unsigned chosen = ready_[at];
      ready_[at] = ready_.back();
      ready_.pop_back();
      return threads_[chosen];
    }
    constexpr unsigned kWords = kMaxThreads / 64;
    for (unsigned i = 0; i < kWords; ++i) {
      uint64_t& word = ready_bits_[order_ == Order::forward ? i : kWords - 1 - i];
      if (word == 0) continue;
      const unsigned bit = order_ == Order::forward ? static_cast<unsigned>(__builtin_ctzll(word)) : 63 - static_cast<unsigned>(__builtin_clzll(word));
      word &= ~(uint64_t{1} << bit);
      return threads_[static_cast<unsigned>(&word - ready_bits_) * 64 + bit];
    }
    std::abort();
  }
  void wake(Thread& t) {
    t.state = Thread::State::ready;
    if (order_ == Order::random) {
      ready_.push_back(t.linear);
    } else {
      ready_bits_[t.linear / 64] |= uint64_t{1} << t.linear % 64;
    }
  }
  std::string describe_waiting() const;

  Order order_;
  std::mt19937_64* random_;
  std::vector<Thread> threads_;
  std::vector<unsigned> ready_;
  uint64_t ready_bits_[kMaxThreads / 64] = {};
  unsigned at_barrier_ = 0;
  void* scheduler_ = nullptr;
  std::string message_;
  const std::function<void()>* kernel_ = nullptr;
};

Block* running_block = nullptr;

std::string to_text(Site site) { return std::string(site.file) + ":" + std::to_string(site.line); }

void thread_entry() {
  running_block->kernel()();
  if (!current->open_copies.empty() || !current->committed_copies.empty()) {
    running_block->stop("thread " + std::to_string(current->linear) + " ends with asynchronous copies that nobody waited for");
  }
  if (current->open_products + current->committed_products > 0) {
    running_block->stop("thread " + std::to_string(current->linear) + " ends with matrix products that nobody waited for");
  }
  current->state = Thread::State::done;
  running_block->leave();
  std::abort();
}

void Block::run(const std::function<void()>& kernel) {
  kernel_ = &kernel;
  running_block = this;
  for (Thread& t : threads_) t.stack_pointer = new_context(t.linear, thread_entry);
  while (anybody_ready() && message_.empty()) {
    current = &next();
    switch_context(&scheduler_, current->stack_pointer);
  }
  current = nullptr;
  if (message_.empty()) {
    const bool finished = std::all_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.state == Thread::State::done; });
    if (!finished) message_ = "divergent barrier: " + describe_waiting();
  }
}

std::string Block::describe_waiting() const {
  std::map<std::string, unsigned> counts;
  for (const Thread& t : threads_) {
    switch (t.state) {
      case Thread::State::done: ++counts["ended"]; break;
      case Thread::State::at_block_barrier: ++counts["wait at the block barrier " + to_text(t.site)]; break;
      case Thread::State::at_warp_operation: ++counts[std::string("wait in ") + t.operation->name + " " + to_text(t.operation->site)]; break;
      case Thread::State::ready: ++counts["can run"]; break;
    }
  }
  std::string text;
  for (const auto& entry : counts) text += (text.empty() ? "" : ", ") + std::to_string(entry.second) + " threads " + entry.first;
  return text;
}

void Block::arrive_at_barrier(Site site) {
  current->state = Thread::State::at_block_barrier;
  current->site = site;
  if (++at_barrier_ == threads_.size()) {
    for (const Thread& t : threads_) {
      if (t.site.line != site.line || std::strcmp(t.site.file, site.file) != 0) stop("divergent barrier: " + describe_waiting());
    }
    at_barrier_ = 0;
    for (Thread& t : threads_) wake(t);
  }
  leave();
}

void Block::arrive_at_operation(Collective* mine) {
  const unsigned first = current->linear / 32 * 32, lane = current->linear % 32;
  if ((mine->mask >> lane & 1) == 0) stop(std::string(mine->name) + ": lane " + std::to_string(lane) + " is not in its own mask");
  current->state = Thread::State::at_warp_operation;
  current->operation = mine;
  Collective* lanes[32] = {};
  for (unsigned i = 0; i < 32; ++i) {
    if ((mine->mask >> i & 1) == 0) continue;
    if (first + i >= threads_.size()) stop(std::string(mine->name) + ": the mask names a lane that the block does not have");
    const Thread& t = threads_[first + i];
    if (t.state != Thread::State::at_warp_operation) {
      leave();
      return;
    }
    lanes[i] = t.operation;
    if (t.operation->complete != mine->complete || t.operation->mask != mine->mask || t.operation->site.line != mine->site.line) {
      stop("divergent warp operation: " + describe_waiting());
    }
  }
  mine->complete(lanes);
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] != nullptr) wake(threads_[first + i]);
  }
  leave();
}

// ---- shared memory ---------------------------------------------------------------------------------

class SharedMemory {
 public:
  // `bytes` that end exactly at an unmapped page.
  void prepare(size_t bytes) {
    const size_t rounded = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
    if (rounded > mapped_) {
      if (base_ != nullptr) munmap(base_, mapped_ + page_bytes());
      base_ = map_pages(rounded + page_bytes());
      mprotect(base_ + rounded, page_bytes(), PROT_NONE);
      mapped_ = rounded;
    }
    start_ = base_ + mapped_ - (bytes + 15) / 16 * 16;
    std::memset(base_, 0xff, mapped_);
    areas_.clear();
    static_bytes_ = 0;
    dynamic_bytes_ = bytes;
    unpublished_.assign((bytes + 15) / 16, 0);
  }
  size_t dynamic_bytes() const { return dynamic_bytes_; }
  std::vector<unsigned char>& unpublished() { return unpublished_; }
  size_t static_bytes() const { return static_bytes_; }
  void* dynamic() { return start_; }
  void* area(const void* key, size_t bytes) {
    std::vector<uint64_t>& memory = areas_[key];
    if (memory.empty()) {
      memory.assign(bytes / 8 + 3, ~uint64_t{0});
      static_bytes_ += (bytes + 15) / 16 * 16;
    }
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) & ~uintptr_t{15});
  }

 private:
  char* base_ = nullptr;
  char* start_ = nullptr;
  size_t mapped_ = 0;
  size_t static_bytes_ = 0, dynamic_bytes_ = 0;
  std::vector<unsigned char> unpublished_;
  std::map<const void*, std::vector<uint64_t>> areas_;
};

SharedMemory shared_memory;
uint64_t schedule_seed = 2;
std::string last_error;
std::set<const void*> launched;

// What every device has, and what the emulated one does.
constexpr uint64_t kMostBlocksX = (uint64_t{1} << 31) - 1, kMostBlocksYZ = 65535;
constexpr size_t kMostStaticShared = 48 * 1024, kReservedShared = 1024;

std::string launch_problem(Index3 grid, Index3 block) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads) return "a launch of blocks of " + std::to_string(threads) + " threads";
  const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0;
  if (empty || grid.x > kMostBlocksX || grid.y > kMostBlocksYZ || grid.z > kMostBlocksYZ) {
    return "a launch of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " + std::to_string(grid.z) + " blocks";
  }
  return "";
}

std::string shared_problem(size_t dynamic_bytes, size_t static_bytes) {
  const size_t most = static_cast<size_t>(multiprocessor_shared_bytes) - kReservedShared;
  if (static_bytes <= kMostStaticShared && dynamic_bytes + static_bytes <= most) return "";
  return "a block takes " + std::to_string(dynamic_bytes) + " + " + std::to_string(static_bytes) + " bytes of shared memory and may have " + std::to_string(most);
}

void do_copy(const PendingCopy& copy) {
  std::memcpy(copy.target, copy.source, copy.valid);
  std::memset(static_cast<char*>(copy.target) + copy.valid, 0, copy.bytes - copy.valid);
  const size_t chunk = static_cast<size_t>(static_cast<char*>(copy.target) - static_cast<char*>(shared_memory.dynamic())) / 16;
  if (chunk >= shared_memory.unpublished().size()) return;
  shared_memory.unpublished()[chunk] = 1;
  current->unpublished.push_back(chunk);
}

}  // namespace

struct Skip {
  std::string file;
  int line = 0;
  uint64_t count = 0;
};
Skip skip;

bool is_skipped(Site site) {
  if (site.line != skip.line) return false;
  const char* const slash = std::strrchr(site.file, '/');
  if (skip.file != (slash != nullptr ? slash + 1 : site.file)) return false;
  ++skip.count;
  return true;
}

void block_barrier(Site site) { running_block->arrive_at_barrier(site); }
void warp_operation(Collective* mine) { running_block->arrive_at_operation(mine); }

void fail(const std::string& message, Site site) {
  running_block->stop(message + " at " + to_text(site));
  std::abort();
}

void commit_copies() {
  current->committed_copies.push_back(std::move(current->open_copies));
  current->open_copies.clear();
}

void wait_copies(size_t groups_left_open) {
  auto& groups = current->committed_copies;
  const size_t finished = groups.size() > groups_left_open ? groups.size() - groups_left_open : 0;
  for (size_t i = 0; i < finished; ++i) {
    for (const PendingCopy& copy : groups[i]) do_copy(copy);
  }
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(finished));
}

void* dynamic_shared() { return shared_memory.dynamic(); }
size_t dynamic_shared_bytes() { return shared_memory.dynamic_bytes(); }
bool is_published(size_t chunk) { return shared_memory.unpublished().at(chunk) == 0; }
void publish_copies() {
  for (const size_t chunk : current->unpublished) shared_memory.unpublished()[chunk] = 0;
  current->unpublished.clear();
}
bool products_are_early() {
  static uint64_t count = 0;
  return schedule_seed < 2 ? schedule_seed == 0 : (schedule_seed + ++count) % 2 == 0;
}
void* static_shared(const void* key, size_t bytes) { return shared_memory.area(key, bytes); }

int run_grid(Index3 grid, Index3 block, size_t shared_bytes, const void* address, const std::function<void()>& kernel) {
  launched.insert(address);
  last_error = launch_problem(grid, block);
  if (last_error.empty()) last_error = shared_problem(shared_bytes, 0);
  if (!last_error.empty()) return kFailed;
  const unsigned num_threads = block.x * block.y * block.z;
  const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  const Order order = schedule_seed == 0 ? Order::forward : schedule_seed == 1 ? Order::reverse : Order::random;
  std::mt19937_64 random(schedule_seed);
  std::vector<uint64_t> blocks(num_blocks);
  for (uint64_t i = 0; i < num_blocks; ++i) blocks[i] = order == Order::reverse ? num_blocks - 1 - i : i;
  if (order == Order::random) std::shuffle(blocks.begin(), blocks.end(), random);
  grid_dim = grid;
  block_dim = block;
  for (const uint64_t at : blocks) {
    block_index = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y), static_cast<unsigned>(at / grid.x / grid.y)};
    shared_memory.prepare(shared_bytes);
    Block running(num_threads, block, order, &random);
    running.run(kernel);
    running_block = nullptr;
    last_error = running.message().empty() ? shared_problem(shared_bytes, shared_memory.static_bytes()) : running.message();
    if (!last_error.empty()) return kFailed;
  }
  return 0;
}

}  // namespace shim
}  // namespace fastengine

extern "C" {
void fe_shim_set_schedule(uint64_t seed) { fastengine::shim::schedule_seed = seed; }
void fe_shim_set_multiprocessor_shared(int bytes) { fastengine::shim::multiprocessor_shared_bytes = bytes; }
void fe_shim_skip_barrier(const char* file, int line) {
  fastengine::shim::skip = {};
  if (file != nullptr) fastengine::shim::skip.file = file, fastengine::shim::skip.line = line;
}
uint64_t fe_shim_skipped() { return fastengine::shim::skip.count; }
uint64_t fe_shim_launched(const void** addresses, uint64_t most) {
  const uint64_t count = fastengine::shim::launched.size();
  uint64_t i = 0;
  for (const void* address : fastengine::shim::launched) {
    if (i < most) addresses[i++] = address;
  }
  fastengine::shim::launched.clear();
  return count;
}
const char* fe_shim_error() { return fastengine::shim::last_error.c_str(); }
}
