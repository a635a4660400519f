// From logits to tokens and log-probabilities, a row at a time, while it is in the cache.
#include "launchers.h"
#include "parallel.h"
#include "rows.h"

namespace fastengine {
namespace FE_ISA {
namespace {

bool is_adjusted(const RowSamplingArgs& a, int64_t r) {
  const PenaltyArgs& p = a.adjust;
  const bool changed = p.row_starts != nullptr &&
                       (p.repetition[r] != 1.0f || p.presence[r] != 0.0f || p.frequency[r] != 0.0f || p.bias_starts[r + 1] > p.bias_starts[r]);
  return changed || (a.mask_of != nullptr && a.mask_of[r] >= 0);
}

void forbid(const uint8_t* allowed, float* logits, int64_t vocab_size) {
  const float lowest = -__builtin_inff();
  for (int64_t i = 0; i < vocab_size; ++i) logits[i] = allowed[i] != 0 ? logits[i] : lowest;
}

// memory: scratch of the row functions, zeroed counts [vocab_size], a row of logits.
void sample_one(const RowSamplingArgs& a, int64_t r, char* memory) {
  const int64_t vocab_size = a.draw.vocab_size, padded = ceil_div(vocab_size, 16) * 16;
  float* const logits = const_cast<float*>(a.draw.logits) + r * vocab_size;
  int32_t* const seen = reinterpret_cast<int32_t*>(memory + row_scratch_bytes(vocab_size));
  float* const copy = reinterpret_cast<float*>(seen + padded);
  const bool wanted = a.wanted != nullptr && a.wanted[r] >= 0, adjusted = is_adjusted(a, r);
  const float* judged = logits;
  if (wanted && adjusted && a.from_processed == 0) {
    __builtin_memcpy(copy, logits, static_cast<size_t>(vocab_size) * sizeof(float));
    judged = copy;
  }
  if (adjusted && a.adjust.row_starts != nullptr) penalize_row(a.adjust, r, seen);
  if (a.mask_of != nullptr && a.mask_of[r] >= 0) forbid(a.allowed + a.mask_of[r] * vocab_size, logits, vocab_size);
  a.draw.token_ids[r] = sample_row(a.draw, r, memory);
  if (!wanted) return;
  const float temperature = a.draw.temperature[r];
  if (a.from_processed != 0 && temperature > 0.0f) {
    for (int64_t i = 0; i < vocab_size; ++i) copy[i] = logits[i] / temperature;
    judged = copy;
  }
  logprob_row(a.logprobs, r, judged, memory);
}

}  // namespace

void sample_rows(const RowSamplingArgs& args) {
  const int64_t padded = ceil_div(args.draw.vocab_size, 16) * 16, scratch = row_scratch_bytes(args.draw.vocab_size);
  parallel_for(args.draw.num_rows, args.draw.num_rows * args.draw.vocab_size * 8, [&](int64_t r) {
    char* const memory = static_cast<char*>(thread_scratch(scratch + 8 * padded));
    if (args.adjust.row_starts != nullptr) __builtin_memset(memory + scratch, 0, static_cast<size_t>(4 * padded));
    sample_one(args, r, memory);
  });
}

}  // namespace FE_ISA
}  // namespace fastengine
