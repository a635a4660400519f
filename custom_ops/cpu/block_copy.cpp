// Copies KV blocks between pools in this process's memory, those of all layers in one call.
#include <cstdint>
#include <cstring>

#include "kernels/thread_pool.h"

namespace fastengine {
namespace {

// Waking a parked thread takes as long as copying some hundred KiB.
constexpr int64_t kMinParallelBytes = 1 << 19;

struct BlockCopy {
  const uint8_t* const* sources;
  uint8_t* const* targets;
  const int64_t* block_bytes;
  const int32_t* pairs;
  int64_t num_pairs;

  void copy_pool(int64_t pool) const {
    const int64_t bytes = block_bytes[pool];
    for (int64_t i = 0; i < num_pairs; ++i) {
      std::memcpy(targets[pool] + pairs[2 * i + 1] * bytes, sources[pool] + pairs[2 * i] * bytes, static_cast<size_t>(bytes));
    }
  }
};

void copy_task(void* context, int64_t pool) { static_cast<const BlockCopy*>(context)->copy_pool(pool); }

}  // namespace
}  // namespace fastengine

// targets[p][pairs[i][1]] = sources[p][pairs[i][0]] for every pool p, whose blocks have block_bytes[p] bytes; pair after pair.
extern "C" __attribute__((visibility("default"))) void fastengine_copy_blocks(const uint8_t* const* sources, uint8_t* const* targets,
                                                                              const int64_t* block_bytes, int64_t num_pools, const int32_t* pairs,
                                                                              int64_t num_pairs) {
  fastengine::BlockCopy copy{sources, targets, block_bytes, pairs, num_pairs};
  int64_t bytes = 0;
  for (int64_t pool = 0; pool < num_pools; ++pool) bytes += block_bytes[pool] * num_pairs;
  if (bytes >= fastengine::kMinParallelBytes && fastengine::num_threads() > 1) {
    fastengine::run_tasks(num_pools, &fastengine::copy_task, &copy);
  } else {
    for (int64_t pool = 0; pool < num_pools; ++pool) copy.copy_pool(pool);
  }
}
