// Finds where a row of logits, sorted, would reach a count or a mass, without sorting it.
//
//   key     of an entry: the bits of -(logit - maximum) / temperature, then its id. Ascending keys are
//           descending logits, of equals the lower id first; no two keys are the same.
//   limit   the key of the last entry kept
//   weight  e^scaled as a whole number of 2^-40: sums do not depend on the order of adding
//
// A first pass counts by the exponent of the value, every thread in bins of its own. The following ones
// refine the bin where the target is reached by 8 bits each, with atomics, and end as soon as a bin is taken
// whole, which is when one entry is left in it at the latest.
#pragma once

#include "reduce.h"

namespace fastengine {
namespace cuda {

constexpr int kSelectThreads = 512;
constexpr int kClasses = 16;
constexpr int kBins = 256;
constexpr int kCopies = 8;   // of the bins, against threads that meet in one
constexpr int kIdBits = 20;
constexpr float kWeightOne = 1099511627776.0f;  // 2^40

// A row of logits as the filters see it.
struct LogitRow {
  const float* logits;
  int size;
  float maximum;
  float inverse_temperature;

  // At most 0; NaN counts as -inf.
  FE_DEVICE float scaled(int id) const {
    const float value = (logits[id] - maximum) * inverse_temperature;
    return value <= 0.0f ? value : value > 0.0f ? 0.0f : -INFINITY;
  }
  static FE_DEVICE uint64_t key(float scaled, int id) {
    return static_cast<uint64_t>(__float_as_uint(-scaled) & 0x7fffffffu) << kIdBits | static_cast<uint32_t>(id);
  }
  static FE_DEVICE uint64_t weight(float scaled) { return static_cast<uint64_t>(expf(scaled) * kWeightOne); }
};

struct Tally {
  uint64_t mass;
  uint32_t count;
};

// Shared memory of the selection: the threads' own bins, later the refined ones.
struct SelectMemory {
  uint64_t* mass;    // [kClasses * kSelectThreads], or [kBins * kCopies]
  uint32_t* count;   // likewise
  uint64_t* result;  // [4]

  static constexpr int kBytes = kClasses * kSelectThreads * 12 + 32;
  FE_DEVICE explicit SelectMemory(unsigned char* shared)
      : mass(reinterpret_cast<uint64_t*>(shared)),
        count(reinterpret_cast<uint32_t*>(shared + kClasses * kSelectThreads * 8)),
        result(reinterpret_cast<uint64_t*>(shared + kClasses * kSelectThreads * 12)) {}
};

// The exponent of -scaled in 16 classes, ascending: below 2^-7, [2^-7, 2^-6), ..., [2^6, 2^7), 2^7 and more.
FE_DEVICE int class_of(uint64_t key) {
  const int exponent = static_cast<int>(key >> (kIdBits + 23)) - 127 + 8;
  return exponent < 0 ? 0 : exponent > kClasses - 1 ? kClasses - 1 : exponent;
}
// The lowest key of a class.
FE_DEVICE uint64_t class_begin(int c) { return c == 0 ? 0 : static_cast<uint64_t>(c + 127 - 8) << (kIdBits + 23); }

// Where the running total of `bins` (a multiple of 32) bins, summed over `copies`, reaches `target`. Warp 0 only.
// result: the bin, the total before it, the bin's own, its count.
FE_DEVICE void find_bin(const SelectMemory& memory, int bins, int copies, bool by_mass, uint64_t before, uint64_t target) {
  const int per_lane = larger(1, bins / kWarp), first = lane_id() * per_lane;
  const auto total_of = [&](int bin, uint64_t* count) {
    uint64_t mass = 0;
    *count = 0;
    if (bin >= bins) return mass;
    for (int c = 0; c < copies; ++c) {
      mass += memory.mass[bin * copies + c];
      *count += memory.count[bin * copies + c];
    }
    return by_mass ? mass : *count;
  };
  uint64_t mine = 0, count = 0;
  for (int i = 0; i < per_lane; ++i) mine += total_of(first + i, &count);
  uint64_t end = mine;
#pragma unroll
  for (int by = 1; by < kWarp; by *= 2) {
    const uint64_t below = __shfl_up_sync(kAllLanes, end, by);
    if (lane_id() >= by) end += below;
  }
  const bool reaches = before + end >= target;
  const uint32_t lanes = __ballot_sync(kAllLanes, reaches);
  // The target is at most the total, so some lane reaches it.
  if (lane_id() != __ffs(static_cast<int>(lanes)) - 1) return;
  uint64_t total = before + end - mine;
  for (int bin = first;; ++bin) {
    const uint64_t own = total_of(bin, &count);
    if (total + own >= target || bin == first + per_lane - 1) {
      memory.result[0] = static_cast<uint64_t>(bin), memory.result[1] = total, memory.result[2] = own, memory.result[3] = count;
      return;
    }
    total += own;
  }
}

// Adds an entry to a bin, lanes of a warp that all meet in one bin together. All lanes of the warp call.
FE_DEVICE void add_to_bin(const SelectMemory& memory, bool active, int bin, uint64_t weight) {
  const uint32_t lanes = __ballot_sync(kAllLanes, active);
  if (lanes == 0) return;
  const int leader = __ffs(static_cast<int>(lanes)) - 1;
  const int first_bin = __shfl_sync(kAllLanes, bin, leader);
  using Word = unsigned long long;
  if (__all_sync(kAllLanes, !active || bin == first_bin)) {
    const uint64_t total = warp_reduce(active ? weight : uint64_t{0}, Sum());
    if (lane_id() != leader) return;
    atomicAdd(reinterpret_cast<Word*>(memory.mass) + bin * kCopies, static_cast<Word>(total));
    atomicAdd(memory.count + bin * kCopies, static_cast<uint32_t>(__popc(lanes)));
  } else if (active) {
    const int at = bin * kCopies + lane_id() % kCopies;
    atomicAdd(reinterpret_cast<Word*>(memory.mass) + at, static_cast<Word>(weight));
    atomicAdd(memory.count + at, 1u);
  }
}

// The total mass and number of entries with keys up to `limit`. All threads of the block call.
FE_DEVICE Tally count_by_class(const LogitRow& row, uint64_t limit, const SelectMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int c = 0; c < kClasses; ++c) memory.mass[c * kSelectThreads + thread] = 0, memory.count[c * kSelectThreads + thread] = 0;
  for (int id = thread; id < row.size; id += kSelectThreads) {
    const float scaled = row.scaled(id);
    const uint64_t key = LogitRow::key(scaled, id);
    if (key > limit) continue;
    const int at = class_of(key) * kSelectThreads + thread;
    memory.mass[at] += LogitRow::weight(scaled);
    memory.count[at] += 1;
  }
  __syncthreads();
  // Warp w adds up class w.
  for (int c = warp_id(); c < kClasses; c += kSelectThreads / kWarp) {
    uint64_t mass = 0;
    uint32_t count = 0;
    for (int i = lane_id(); i < kSelectThreads; i += kWarp) mass += memory.mass[c * kSelectThreads + i], count += memory.count[c * kSelectThreads + i];
    mass = warp_reduce(mass, Sum());
    count = warp_reduce(count, Sum());
    __syncwarp();
    if (lane_id() == 0) memory.mass[c * kSelectThreads] = mass, memory.count[c * kSelectThreads] = count;
  }
  __syncthreads();
  Tally total{0, 0};
  for (int c = 0; c < kClasses; ++c) total.mass += memory.mass[c * kSelectThreads], total.count += memory.count[c * kSelectThreads];
  return total;
}

// The key of the entry with which the running total of weights (or of entries) first reaches the target;
// `target_of` gives it from the total of all entries up to `limit`, as at least 1 and at most that total.
template <typename TargetOf>
FE_DEVICE uint64_t select(const LogitRow& row, uint64_t limit, bool by_mass, const TargetOf& target_of, const SelectMemory& memory) {
  const Tally all = count_by_class(row, limit, memory);
  const uint64_t target = target_of(all);
  int chosen = 0;
  uint64_t before = 0, own = 0;
  for (int c = 0; c < kClasses; ++c) {
    own = by_mass ? memory.mass[c * kSelectThreads] : memory.count[c * kSelectThreads];
    chosen = c;
    if (before + own >= target) break;
    before += own;
  }
  uint64_t begin = class_begin(chosen);
  uint64_t last = chosen == kClasses - 1 ? ~uint64_t{0} : class_begin(chosen + 1) - 1;
  // The outer classes span several exponents: there the exponent's bits are refined as well.
  int upper = chosen == 0 || chosen == kClasses - 1 ? kIdBits + 31 : kIdBits + 23;
  bool whole = before + own == target;
  const int steps = static_cast<int>(round_up(row.size, kSelectThreads));
  while (upper > 0 && !whole) {
    const int shift = larger(0, upper - 8), bins = 1 << (upper - shift);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kBins * kCopies; i += kSelectThreads) memory.mass[i] = 0, memory.count[i] = 0;
    __syncthreads();
    for (int id = static_cast<int>(threadIdx.x); id < steps; id += kSelectThreads) {
      const float scaled = id < row.size ? row.scaled(id) : -INFINITY;
      const uint64_t key = LogitRow::key(scaled, id);
      const bool active = id < row.size && key >= begin && key <= last && key <= limit;
      add_to_bin(memory, active, static_cast<int>(key >> shift) & (bins - 1), active ? LogitRow::weight(scaled) : 0);
    }
    __syncthreads();
    if (warp_id() == 0) find_bin(memory, kBins, kCopies, by_mass, before, target);
    __syncthreads();
    const uint64_t bin = memory.result[0];
    before = memory.result[1];
    whole = memory.result[3] <= 1 || before + memory.result[2] == target;
    // Below `upper`, begin has only zeros (class 0) or the class's own exponent.
    const uint64_t base = begin >> upper << upper;
    begin = base | bin << shift;
    last = begin | ((uint64_t{1} << shift) - 1);
    upper = shift;
  }
  __syncthreads();
  return last < limit ? last : limit;
}

}  // namespace cuda
}  // namespace fastengine
