// Sampling: one row is one thread's, and depends on nothing but itself.
#include "launchers.h"
#include "parallel.h"
#include "rows.h"
#include "select.h"

namespace fastengine {
namespace FE_ISA {
namespace {

constexpr int64_t kPiece = 1024;                // entries whose mass is summed as one
constexpr float kGreedyTemperature = 1e-5f;     // below it the largest logit is taken
constexpr float kNoFloor = -__builtin_inff();   // a threshold that every entry passes

// Philox4x32-10 (Salmon et al., SC 2011): the first two words of block (position, 0, 0, 0) under the
// key `seed`, as a number in [0, 1) with 53 bits.
double uniform(int64_t seed, int32_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(static_cast<uint64_t>(seed)), k1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const uint64_t word = static_cast<uint64_t>(c1) << 32 | c0;
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

struct Row {
  const float* logits;
  int64_t size;
  float maximum, inverse_temperature;
};

Vec row_weights(const Row& row, int64_t i, int64_t lanes) {
  const Vec weights = vexp(scaled(vload_n(row.logits + i, lanes), vset(row.maximum), vset(row.inverse_temperature)));
  return vkeep_n(weights, lanes, vzero());
}

double piece_mass(const Row& row, int64_t piece) {
  const int64_t begin = piece * kPiece, end = min_i(row.size, begin + kPiece);
  Vec total = vzero();
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) total = vadd(total, vexp(scaled(vload(row.logits + i), vset(row.maximum), vset(row.inverse_temperature))));
  if (i < end) total = vadd(total, row_weights(row, i, end - i));
  return static_cast<double>(vsum(total));
}

// Scaled logits at which a row is cut to look for its nucleus.
constexpr int kCuts = 6;
constexpr float kCutAt[kCuts] = {-1.5f, -3.0f, -5.0f, -7.0f, -10.0f, -14.0f};

// The row's whole mass, and of it what is at each cut or above.
double masses_at_cuts(const Row& row, double* at_cut) {
  double total = 0.0;
  for (int i = 0; i < kCuts; ++i) at_cut[i] = 0.0;
  for (int64_t begin = 0; begin < row.size; begin += kPiece) {
    const int64_t end = min_i(row.size, begin + kPiece);
    Vec all = vzero(), sums[kCuts];
    for (Vec& sum : sums) sum = vzero();
    const auto add = [&](Vec logits, int64_t lanes) {
      const Vec values = scaled(logits, vset(row.maximum), vset(row.inverse_temperature));
      const Vec weights = lanes == kLanes ? vexp(values) : vkeep_n(vexp(values), lanes, vzero());
      all = vadd(all, weights);
      for (int cut = 0; cut < kCuts; ++cut) sums[cut] = add_where_ge(sums[cut], weights, values, vset(kCutAt[cut]));
    };
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) add(vload(row.logits + i), kLanes);
    if (i < end) add(vload_n(row.logits + i, end - i), end - i);
    total += static_cast<double>(vsum(all));
    for (int cut = 0; cut < kCuts; ++cut) at_cut[cut] += static_cast<double>(vsum(sums[cut]));
  }
  return total;
}

// The entry in which the running sum of weights passes `point`, or the last one with any weight.
int32_t pick(const float* weights, int64_t count, double point, double* passed) {
  int32_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] <= 0.0f) continue;
    last = static_cast<int32_t>(i);
    *passed += static_cast<double>(weights[i]);
    if (*passed > point) break;
  }
  return last;
}

// No filter: find the piece by its mass, then the entry within it.
int32_t sample_whole_row(const Row& row, double u, double* masses) {
  const int64_t pieces = ceil_div(row.size, kPiece);
  double total = 0.0;
  for (int64_t piece = 0; piece < pieces; ++piece) total += masses[piece] = piece_mass(row, piece);
  const double point = u * total;
  double passed = 0.0;
  int64_t piece = 0;
  while (piece + 1 < pieces && passed + masses[piece] <= point) passed += masses[piece++];
  while (masses[piece] == 0.0) --piece;  // rounding led past the last entry that has weight
  const int64_t begin = piece * kPiece, count = min_i(row.size - begin, kPiece);
  float weights[kPiece + 16];
  for (int64_t i = 0; i < count; i += kLanes) vstore(weights + i, row_weights(row, begin + i, min_i(kLanes, count - i)));
  return static_cast<int32_t>(begin) + pick(weights, count, point, &passed);
}

void fill_weights(Candidates* c) {
  for (int64_t i = 0; i < c->count; i += kLanes) {
    const int64_t lanes = min_i(kLanes, c->count - i);
    vstore_n(c->weights + i, vexp(vload_n(c->values + i, lanes)), lanes);
  }
}

double mass_of(const Candidates& c) {
  double total;
  sum_where_ge<1>(c, c.weights, &kNoFloor, &total);
  return total;
}

void gather(const Row& row, float threshold, Candidates* c) {
  gather_candidates(row.logits, row.size, row.maximum, row.inverse_temperature, threshold, c);
  fill_weights(c);
}

// As pick(), over all candidates: passes over whole pieces first.
int32_t pick_of_many(const Candidates& c, double point) {
  double passed = 0.0;
  int64_t begin = 0;
  for (; begin + kSumPiece < c.count; begin += kSumPiece) {
    const Candidates piece{c.values + begin, c.ids + begin, c.weights + begin, kSumPiece, nullptr};
    const double mass = mass_of(piece);
    if (passed + mass > point) break;
    passed += mass;
  }
  const int32_t picked = pick(c.weights + begin, c.count - begin, point, &passed);
  return picked < 0 ? picked : static_cast<int32_t>(begin) + picked;
}

// Gathers from the top until `enough` holds, first what is above `threshold`; most rows need one or two passes.
template <typename Enough>
void gather_until(const Row& row, float threshold, Candidates* c, Enough enough) {
  for (; threshold > -60.0f; threshold *= 2.0f) {
    gather(row, threshold, c);
    if (enough()) return;
  }
  gather(row, kNoFloor, c);
}

struct Filters {
  int64_t top_k;  // 0: off
  float top_p;    // 1: off
  float min_p;    // 0: off
};

void filter(const Row& row, const Filters& filters, Candidates* c) {
  if (filters.top_k > 0) {
    gather_until(row, -2.0f, c, [&] { return c->count >= filters.top_k; });
    if (c->count > filters.top_k) keep_prefix(c, select_prefix(*c, nullptr, static_cast<double>(filters.top_k)));
    if (filters.top_p < 1.0f) keep_prefix(c, select_prefix(*c, c->weights, static_cast<double>(filters.top_p) * mass_of(*c)));
  } else if (filters.top_p < 1.0f) {
    double at_cut[kCuts];
    const double target = static_cast<double>(filters.top_p) * masses_at_cuts(row, at_cut);
    int cut = 0;
    while (cut < kCuts && at_cut[cut] < target) ++cut;
    gather(row, cut < kCuts ? kCutAt[cut] : kNoFloor, c);
    // In another order the same entries may add up to a little less.
    if (cut < kCuts && mass_of(*c) < target) gather(row, kNoFloor, c);
    keep_prefix(c, select_prefix(*c, c->weights, target));
  } else {
    gather(row, __builtin_logf(filters.min_p), c);
  }
  if (filters.min_p <= 0.0f) return;
  // Relative to the largest probability: the same whatever the others left.
  const float floor = __builtin_logf(filters.min_p);
  int64_t kept = 0;
  for (int64_t i = 0; i < c->count; ++i) {
    if (c->values[i] < floor) continue;
    c->values[kept] = c->values[i];
    c->weights[kept] = c->weights[i];
    c->ids[kept] = c->ids[i];
    ++kept;
  }
  c->count = kept;
}

}  // namespace

int32_t sample_row(const SampleArgs& a, int64_t r, char* scratch) {
  const float* const logits = a.logits + r * a.vocab_size;
  const float maximum = row_maximum(logits, a.vocab_size);
  const float temperature = a.temperature[r];
  // No finite maximum, no distribution: the same answer as the greedy one.
  if (!(temperature >= kGreedyTemperature) || __builtin_isinf(maximum)) return first_at_least(logits, a.vocab_size, maximum);
  const Row row{logits, a.vocab_size, maximum, 1.0f / temperature};
  const double u = uniform(a.seeds[r], a.positions[r]);
  const float min_p = a.min_p[r] < 1.0f ? a.min_p[r] : 1.0f;
  const Filters filters{a.top_k[r] > 0 && a.top_k[r] < a.vocab_size ? a.top_k[r] : 0, a.top_p[r], min_p};
  if (filters.top_k == 0 && !(filters.top_p < 1.0f) && !(filters.min_p > 0.0f)) {
    return sample_whole_row(row, u, reinterpret_cast<double*>(scratch));
  }
  const int64_t padded = ceil_div(a.vocab_size, 16) * 16;
  float* const values = reinterpret_cast<float*>(scratch);
  Candidates c{values, reinterpret_cast<int32_t*>(values + padded), values + 2 * padded, 0, values + 3 * padded};
  filter(row, filters, &c);
  const int32_t picked = pick_of_many(c, u * mass_of(c));
  return picked < 0 ? first_at_least(logits, a.vocab_size, maximum) : c.ids[picked];
}

void argmax(const float* logits, int32_t* token_ids, int64_t num_rows, int64_t vocab_size) {
  parallel_ranges(num_rows, 2 * vocab_size, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* const row = logits + r * vocab_size;
      token_ids[r] = first_at_least(row, vocab_size, row_maximum(row, vocab_size));
    }
  });
}

void sample(const SampleArgs& args) {
  const int64_t scratch_size = row_scratch_bytes(args.vocab_size);
  parallel_for(args.num_rows, args.num_rows * args.vocab_size * 8, [&](int64_t r) {
    args.token_ids[r] = sample_row(args, r, static_cast<char*>(thread_scratch(scratch_size)));
  });
}

}  // namespace FE_ISA
}  // namespace fastengine
