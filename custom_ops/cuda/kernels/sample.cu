// Argmax, and sampling with temperature, top-k, top-p and min-p without a sort. One block per row.
//
// The token is where the running sum of the kept weights, in order of id, passes the row's random number:
//
//   1 maximum   2 .. n the limits of top-k and top-p (select.h)   sums of pieces of 1,024 entries
//   the piece that passes it, then the entry
//
// Random numbers: Philox4x32-10 (Salmon et al., SC 2011) of the row's seed and position. Sums are of whole
// numbers: the result depends on nothing but the row.
#include "device/select.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr float kGreedyTemperature = 1e-5f;
constexpr int kPiece = 1024;

struct Best {
  float value;
  int id;
};

// The larger value, of equals the lower id; NaN loses.
struct Better {
  FE_DEVICE Best operator()(Best a, Best b) const { return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a; }
};

FE_DEVICE Best row_best(const float* logits, int size, Best* scratch) {
  Best best{-INFINITY, 0};
  bool found = false;
  for (int id = static_cast<int>(threadIdx.x); id < size; id += static_cast<int>(blockDim.x)) {
    const float value = logits[id];
    // Ascending ids: the first of equals stays.
    if (value > best.value || (!found && value == best.value)) best = {value, id}, found = true;
  }
  if (!found) best.id = size;
#pragma unroll
  for (int bits = kWarp / 2; bits > 0; bits /= 2) {
    const Best other{__shfl_xor_sync(kAllLanes, best.value, bits), __shfl_xor_sync(kAllLanes, best.id, bits)};
    best = Better()(best, other);
  }
  if (lane_id() == 0) scratch[warp_id()] = best;
  __syncthreads();
  best = scratch[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / kWarp; ++w) best = Better()(best, scratch[w]);
  // A row of NaN alone.
  if (best.id >= size) best.id = 0;
  return best;
}

__global__ void __launch_bounds__(kSelectThreads) argmax_kernel(const ArgmaxArgs a) {
  FE_SHARED_ARRAY(Best, scratch, kWarp);
  const Best best = row_best(a.logits + static_cast<int64_t>(blockIdx.x) * a.vocab_size, static_cast<int>(a.vocab_size), scratch);
  if (threadIdx.x == 0) a.token_ids[blockIdx.x] = best.id;
}

// In [0, 1): 53 bits of Philox4x32-10 with the seed as key and (position, 0, 0, 0) as counter.
FE_DEVICE double uniform(int64_t seed, int32_t position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), 0, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint32_t low0 = 0xD2511F53u * counter[0], high0 = __umulhi(0xD2511F53u, counter[0]);
    const uint32_t low1 = 0xCD9E8D57u * counter[2], high1 = __umulhi(0xCD9E8D57u, counter[2]);
    counter[0] = high1 ^ counter[1] ^ key[0];
    counter[1] = low1;
    counter[2] = high0 ^ counter[3] ^ key[1];
    counter[3] = low0;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return static_cast<double>((static_cast<uint64_t>(counter[1]) << 32 | counter[0]) >> 11) * 0x1p-53;
}

// The smallest float that is at least log(p).
FE_DEVICE float log_at_least(float p) {
  const double exact = log(static_cast<double>(p));
  const float near = static_cast<float>(exact);
  return static_cast<double>(near) < exact ? nextafterf(near, INFINITY) : near;
}

struct Kept {
  uint64_t limit;
  float floor;

  FE_DEVICE uint64_t weight(const LogitRow& row, int id) const {
    const float scaled = row.scaled(id);
    return LogitRow::key(scaled, id) <= limit && scaled >= floor ? LogitRow::weight(scaled) : 0;
  }
};

// The first id at which the running sum of weights exceeds u times the total.
FE_DEVICE int pick(const LogitRow& row, const Kept& kept, double u, uint64_t* piece_sums) {
  const int pieces = static_cast<int>(ceil_div(row.size, kPiece));
  for (int p = warp_id(); p < pieces; p += kSelectThreads / kWarp) {
    uint64_t sum = 0;
    for (int id = p * kPiece + lane_id(); id < smaller(row.size, (p + 1) * kPiece); id += kWarp) sum += kept.weight(row, id);
    sum = warp_reduce(sum, Sum());
    if (lane_id() == 0) piece_sums[p] = sum;
  }
  __syncthreads();
  if (warp_id() != 0) return 0;
  uint64_t total = 0;
  for (int p = 0; p < pieces; ++p) total += piece_sums[p];
  const uint64_t target = static_cast<uint64_t>(u * static_cast<double>(total));
  uint64_t before = 0;
  int piece = 0;
  for (; piece < pieces - 1 && before + piece_sums[piece] <= target; ++piece) before += piece_sums[piece];
  for (int first = piece * kPiece; first < row.size; first += kWarp) {
    const int id = first + lane_id();
    uint64_t end = id < row.size ? kept.weight(row, id) : 0;
#pragma unroll
    for (int by = 1; by < kWarp; by *= 2) {
      const uint64_t below = __shfl_up_sync(kAllLanes, end, by);
      if (lane_id() >= by) end += below;
    }
    const uint32_t passed = __ballot_sync(kAllLanes, before + end > target);
    if (passed != 0) return first + __ffs(static_cast<int>(passed)) - 1;
    before += __shfl_sync(kAllLanes, end, kWarp - 1);
  }
  return -1;
}

__global__ void __launch_bounds__(kSelectThreads, 1) sample_kernel(const SampleArgs a) {
  FE_SHARED_ARRAY(Best, scratch, kWarp);
  const SelectMemory memory(dynamic_shared());
  const int64_t r = blockIdx.x;
  const int size = static_cast<int>(a.vocab_size);
  const float* const logits = a.logits + r * a.vocab_size;
  const Best best = row_best(logits, size, scratch);
  const float temperature = a.temperature[r];
  if (!(temperature >= kGreedyTemperature) || !(fabsf(best.value) < INFINITY)) {
    if (threadIdx.x == 0) a.token_ids[r] = best.id;
    return;
  }
  const LogitRow row{logits, size, best.value, 1.0f / temperature};
  Kept kept{~uint64_t{0}, -INFINITY};
  const int top_k = a.top_k[r];
  const float top_p = a.top_p[r], min_p = a.min_p[r];
  if (top_k > 0 && top_k < size) {
    kept.limit = select(row, kept.limit, false, [&](Tally) { return static_cast<uint64_t>(top_k); }, memory);
  }
  if (top_p < 1.0f) {
    const auto target = [&](Tally all) { return larger<uint64_t>(1, static_cast<uint64_t>(ceil(static_cast<double>(top_p) * static_cast<double>(all.mass)))); };
    kept.limit = select(row, kept.limit, true, target, memory);
  }
  if (min_p > 0.0f) kept.floor = log_at_least(fminf(min_p, 1.0f));
  const int id = pick(row, kept, uniform(a.seeds[r], a.positions[r]), memory.mass);
  if (threadIdx.x == 0) a.token_ids[r] = id < 0 ? best.id : id;
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(argmax, ArgmaxArgs) {
  using namespace fastengine::cuda;
  if (args->vocab_size <= 0 || args->vocab_size >= int64_t{1} << 31) return kUnsupported;
  if (args->num_rows == 0) return 0;
  return launch(argmax_kernel, dim3(static_cast<unsigned>(args->num_rows)), dim3(kSelectThreads), 0, static_cast<cudaStream_t>(stream), *args);
}

FE_OPERATOR(sample, SampleArgs) {
  using namespace fastengine::cuda;
  if (args->vocab_size <= 0 || args->vocab_size > int64_t{1} << kIdBits) return kUnsupported;
  if (args->num_rows == 0) return 0;
  return launch(sample_kernel, dim3(static_cast<unsigned>(args->num_rows)), dim3(kSelectThreads), SelectMemory::kBytes, static_cast<cudaStream_t>(stream), *args);
}
