// Penalties and log-probabilities over rows of logits.
#include "launchers.h"
#include "parallel.h"
#include "rows.h"
#include "select.h"

namespace fastengine {
namespace FE_ISA {
// `seen` is zero everywhere before and after: 1 + the token's count in the output, once it was met.
void penalize_row(const PenaltyArgs& a, int64_t r, int32_t* seen) {
  float* const logits = a.logits + r * a.vocab_size;
  const int64_t begin = a.row_starts[r], outputs = a.output_starts[r], end = a.row_ends[r];
  const auto known = [&](int64_t i) { return a.token_ids[i] >= 0 && a.token_ids[i] < a.vocab_size; };
  const float repetition = a.repetition[r], presence = a.presence[r], frequency = a.frequency[r];
  if (repetition != 1.0f || presence != 0.0f || frequency != 0.0f) {
    for (int64_t i = begin; i < end; ++i) {
      if (!known(i)) continue;
      int32_t& count = seen[a.token_ids[i]];
      if (count == 0) count = 1;
      if (i >= outputs) ++count;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (!known(i)) continue;
      const int32_t id = a.token_ids[i], count = seen[id];
      if (count == 0) continue;
      seen[id] = 0;
      float logit = logits[id];
      logit = logit > 0.0f ? logit / repetition : logit * repetition;
      if (count > 1) logit -= frequency * static_cast<float>(count - 1) + presence;
      logits[id] = logit;
    }
  }
  for (int64_t i = a.bias_starts[r]; i < a.bias_starts[r + 1]; ++i) {
    const int32_t id = a.bias_ids[i];
    if (id >= 0 && id < a.vocab_size) logits[id] += a.bias_values[i];
  }
}

namespace {

void sort_descending(Candidates* c) {
  // Heap sort by (value descending, id ascending); k is small and this needs no scratch.
  const auto later = [&](int64_t i, int64_t j) {
    return c->values[i] < c->values[j] || (c->values[i] == c->values[j] && c->ids[i] > c->ids[j]);
  };
  const auto swap = [&](int64_t i, int64_t j) {
    const float value = c->values[i];
    const int32_t id = c->ids[i];
    c->values[i] = c->values[j];
    c->ids[i] = c->ids[j];
    c->values[j] = value;
    c->ids[j] = id;
  };
  const auto sift = [&](int64_t root, int64_t n) {
    for (int64_t child = 2 * root + 1; child < n; root = child, child = 2 * root + 1) {
      if (child + 1 < n && later(child + 1, child)) ++child;
      if (!later(child, root)) return;
      swap(child, root);
    }
  };
  for (int64_t i = c->count / 2; i-- > 0;) sift(i, c->count);
  for (int64_t n = c->count; n-- > 1;) {
    swap(0, n);
    sift(0, n);
  }
}

double sum_of_exponentials(const float* logits, int64_t n, float maximum) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += 1024) {
    const int64_t end = min_i(n, begin + 1024);
    Vec sum = vzero();
    for (int64_t i = begin; i < end; i += kLanes) {
      const int64_t lanes = min_i(kLanes, end - i);
      sum = vadd(sum, vkeep_n(vexp(scaled(vload_n(logits + i, lanes), vset(maximum), vset(1.0f))), lanes, vzero()));
    }
    total += static_cast<double>(vsum(sum));
  }
  return total;
}

int32_t count_greater(const float* logits, int64_t n, float value) {
  int32_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t lanes = min_i(kLanes, n - i);
    count += __builtin_popcount(vgt_bits(vload_n(logits + i, lanes), vset(value)) & ((1u << lanes) - 1u));
  }
  return count;
}

}  // namespace

void logprob_row(const LogprobArgs& a, int64_t r, const float* logits, char* scratch) {
  const float lowest = -__builtin_inff();
  const float maximum = row_maximum(logits, a.vocab_size);
  const float base = __builtin_isinf(maximum) ? 0.0f : maximum;
  const float log_sum = static_cast<float>(__builtin_log(sum_of_exponentials(logits, a.vocab_size, base)));
  const float chosen = logits[a.token_ids[r]];
  a.logprobs[r] = chosen == chosen && chosen > lowest ? chosen - base - log_sum : lowest;
  a.ranks[r] = 1 + count_greater(logits, a.vocab_size, chosen == chosen ? chosen : lowest);
  if (a.k == 0) return;
  const int64_t padded = ceil_div(a.vocab_size, 16) * 16;
  float* const values = reinterpret_cast<float*>(scratch);
  Candidates c{values, reinterpret_cast<int32_t*>(values + padded), values + 2 * padded, 0, values + 3 * padded};
  for (float threshold = -2.0f; c.count < a.k; threshold *= 2.0f) {
    gather_candidates(logits, a.vocab_size, base, 1.0f, threshold > -60.0f ? threshold : lowest, &c);
  }
  if (c.count > a.k) keep_prefix(&c, select_prefix(c, nullptr, static_cast<double>(a.k)));
  sort_descending(&c);
  for (int64_t i = 0; i < a.k; ++i) {
    a.top_ids[r * a.k + i] = c.ids[i];
    a.top_logprobs[r * a.k + i] = c.values[i] > lowest ? c.values[i] - log_sum : lowest;
  }
}

void apply_penalties(const PenaltyArgs& args) {
  const int64_t num_bytes = args.vocab_size * static_cast<int64_t>(sizeof(int32_t));
  const int64_t work = 8 * (args.row_ends[args.num_rows - 1] + args.bias_starts[args.num_rows]) + args.num_rows * args.vocab_size / 8;
  parallel_ranges(args.num_rows, work / max_i(1, args.num_rows), [&](int64_t begin, int64_t end) {
    int32_t* const seen = static_cast<int32_t*>(thread_scratch(num_bytes));
    __builtin_memset(seen, 0, static_cast<size_t>(num_bytes));
    for (int64_t r = begin; r < end; ++r) penalize_row(args, r, seen);
  });
}

void log_softmax_gather(const LogprobArgs& args) {
  const int64_t scratch_size = row_scratch_bytes(args.vocab_size);
  parallel_for(args.num_rows, args.num_rows * args.vocab_size * 16, [&](int64_t r) {
    logprob_row(args, r, args.logits + r * args.vocab_size, static_cast<char*>(thread_scratch(scratch_size)));
  });
}

}  // namespace FE_ISA
}  // namespace fastengine
