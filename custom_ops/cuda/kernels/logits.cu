// Penalties, bitmasks and log-probabilities over rows of logits.
#include "device/select.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kSlice = 8192;     // of the vocabulary, whose counts fit in shared memory
constexpr int kMaxTop = 1024;
constexpr uint32_t kKnown = 0x80000000u;

// One slice of one row: counts the row's tokens in shared memory, then touches the logits of those met.
__global__ void __launch_bounds__(kThreads) penalty_kernel(const PenaltyArgs a) {
  uint32_t* const seen = dynamic_shared<uint32_t>();  // output count, and kKnown
  const int64_t r = blockIdx.y;
  const int slice = static_cast<int>(blockIdx.x) * kSlice, size = smaller(kSlice, static_cast<int>(a.vocab_size) - slice);
  float* const logits = a.logits + r * a.vocab_size + slice;
  const float repetition = a.repetition[r], presence = a.presence[r], frequency = a.frequency[r];
  const int thread = static_cast<int>(threadIdx.x);
  if (repetition != 1.0f || presence != 0.0f || frequency != 0.0f) {
    for (int i = thread; i < size; i += kThreads) seen[i] = 0;
    __syncthreads();
    const int outputs = a.output_starts[r], end = a.row_starts[r + 1];
    for (int i = a.row_starts[r] + thread; i < end; i += kThreads) {
      const int at = a.token_ids[i] - slice;
      if (at < 0 || at >= size) continue;
      atomicOr(seen + at, kKnown);
      if (i >= outputs) atomicAdd(seen + at, 1u);
    }
    __syncthreads();
    for (int i = thread; i < size; i += kThreads) {
      if (seen[i] == 0) continue;
      float logit = logits[i];
      logit = logit > 0.0f ? logit / repetition : logit * repetition;
      const uint32_t count = seen[i] & ~kKnown;
      if (count > 0) logit -= frequency * static_cast<float>(count) + presence;
      logits[i] = logit;
    }
  }
  // Biases come on top of it.
  __syncthreads();
  const int begin = a.bias_starts[r], end = a.bias_starts[r + 1];
  for (int i = begin + thread; i < end; i += kThreads) {
    const int id = a.bias_ids[i];
    if (id < slice || id >= slice + size) continue;
    // The first entry of an id adds all of them, in order.
    bool is_first = true;
    for (int j = begin; j < i; ++j) is_first = is_first && a.bias_ids[j] != id;
    if (!is_first) continue;
    float logit = logits[id - slice];
    for (int j = i; j < end; ++j) {
      if (a.bias_ids[j] == id) logit += a.bias_values[j];
    }
    logits[id - slice] = logit;
  }
}

__global__ void __launch_bounds__(kThreads) bitmask_kernel(const BitmaskArgs a) {
  const int64_t words = ceil_div(a.vocab_size, 32), i = blockIdx.y;
  const int64_t id = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (id >= a.vocab_size) return;
  const uint32_t word = static_cast<uint32_t>(a.mask[i * words + id / 32]);
  if ((word >> (id % 32) & 1u) == 0) a.logits[a.rows[i] * a.vocab_size + id] = -INFINITY;
}

// Sorts keys ascending; `size` is a power of two.
FE_DEVICE void sort_keys(uint64_t* keys, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int gap = run / 2; gap > 0; gap /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < size; i += kSelectThreads) {
        const int other = i ^ gap;
        if (other <= i) continue;
        const uint64_t first = keys[i], second = keys[other];
        if ((first > second) == ((i & run) == 0)) keys[i] = second, keys[other] = first;
      }
    }
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kSelectThreads) logprob_kernel(const LogprobArgs a) {
  FE_SHARED_ARRAY(float, scratch, kWarp);
  FE_SHARED_ARRAY(float, sums, kWarp);
  FE_SHARED_ARRAY(int, counts, kWarp);
  FE_SHARED_ARRAY(uint32_t, num_top, 1);
  const SelectMemory memory(dynamic_shared());
  const int64_t r = blockIdx.x;
  const int size = static_cast<int>(a.vocab_size), thread = static_cast<int>(threadIdx.x);
  const float* const logits = a.logits + r * a.vocab_size;
  float maximum = -INFINITY;
  for (int id = thread; id < size; id += kSelectThreads) maximum = fmaxf(maximum, logits[id]);
  maximum = block_reduce(maximum, Maximum(), scratch);
  const LogitRow row{logits, size, fabsf(maximum) < INFINITY ? maximum : 0.0f, 1.0f};
  const int chosen_id = a.token_ids[r];
  const float chosen = logits[chosen_id];
  float sum = 0.0f;
  int larger_logits = 0;
  for (int id = thread; id < size; id += kSelectThreads) {
    sum += expf(row.scaled(id));
    larger_logits += logits[id] > (chosen == chosen ? chosen : -INFINITY) ? 1 : 0;
  }
  const float log_sum = logf(block_reduce(sum, Sum(), sums));
  larger_logits = block_reduce(larger_logits, Sum(), counts);
  if (thread == 0) {
    a.logprobs[r] = chosen > -INFINITY ? chosen - row.maximum - log_sum : -INFINITY;
    a.ranks[r] = 1 + larger_logits;
    num_top[0] = 0;
  }
  const int k = static_cast<int>(a.k);
  if (k == 0) return;
  // Where the selection has its bins: both together are more than a block of sm_89 may have.
  uint64_t* const top = memory.mass;
  static_assert(kMaxTop <= kClasses * kSelectThreads, "the keys fit where the bins were");
  const uint64_t limit = k < size ? select(row, ~uint64_t{0}, false, [&](Tally) { return static_cast<uint64_t>(k); }, memory) : ~uint64_t{0};
  int padded = 2;
  while (padded < k) padded *= 2;
  for (int i = thread; i < padded; i += kSelectThreads) top[i] = ~uint64_t{0};
  __syncthreads();
  for (int id = thread; id < size; id += kSelectThreads) {
    const uint64_t key = LogitRow::key(row.scaled(id), id);
    // Their order here is arbitrary; the sort makes it the same every time.
    if (key <= limit) top[atomicAdd(num_top, 1u)] = key;
  }
  sort_keys(top, padded);
  for (int i = thread; i < k; i += kSelectThreads) {
    const int id = static_cast<int>(top[i] & ((uint64_t{1} << kIdBits) - 1));
    const float scaled = row.scaled(id);
    a.top_ids[r * k + i] = id;
    a.top_logprobs[r * k + i] = scaled > -INFINITY ? scaled - log_sum : -INFINITY;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(apply_penalties, PenaltyArgs) {
  using namespace fastengine::cuda;
  if (args->vocab_size <= 0 || args->vocab_size >= int64_t{1} << 30 || args->num_rows > 65535) return kUnsupported;
  if (args->num_rows == 0) return 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(args->vocab_size, kSlice)), static_cast<unsigned>(args->num_rows));
  return launch(penalty_kernel, grid, dim3(kThreads), kSlice * sizeof(uint32_t), static_cast<cudaStream_t>(stream), *args);
}

FE_OPERATOR(apply_bitmask, BitmaskArgs) {
  using namespace fastengine::cuda;
  if (args->vocab_size <= 0 || args->num_masks > 65535) return kUnsupported;
  if (args->num_masks == 0) return 0;
  const dim3 grid(static_cast<unsigned>(ceil_div(args->vocab_size, kThreads)), static_cast<unsigned>(args->num_masks));
  return launch(bitmask_kernel, grid, dim3(kThreads), 0, static_cast<cudaStream_t>(stream), *args);
}

FE_OPERATOR(log_softmax_gather, LogprobArgs) {
  using namespace fastengine::cuda;
  if (args->vocab_size <= 0 || args->vocab_size > int64_t{1} << kIdBits || args->k > kMaxTop || args->k > args->vocab_size) return kUnsupported;
  if (args->num_rows == 0) return 0;
  return launch(logprob_kernel, dim3(static_cast<unsigned>(args->num_rows)), dim3(kSelectThreads), SelectMemory::kBytes, static_cast<cudaStream_t>(stream), *args);
}
