// The step's memory: one allocation, cut into the arrays of each phase.
#pragma once

#include "attention_plan.h"
#include "activations.h"
#include "gemm.h"
#include "team.h"

namespace fastengine {
namespace FE_ISA {

struct Workspace {
  Team* team;
  float* x;    // [T][hidden]: the residual stream
  float* qkv;  // [T][qkv_stride]
  float* attended;  // [T][num_heads * head_dim]
  float* gated;     // [T][intermediate rounded up]: silu(gate) * up, where it is not quantized at once
  float* samples;   // [R][hidden]: rows that get logits, after the last norm
  // Of few rows, every thread makes a copy of `input` and `context`, which lie `copy_bytes` apart: that is
  // quicker than to wait for each other. 0: there is one, made together.
  Activations input, context, product, last;
  int64_t copy_bytes;
  AttentionPlan plan;
  uint32_t* arrived;  // [layers][splits]
  float* partials;    // of the splits
  uint8_t* scratch;  // [threads][scratch_bytes]
  int64_t scratch_bytes;
  float* best_values;   // [threads][R]
  int32_t* best_ids;    // [threads][R]
  int64_t qkv_stride, gated_stride, num_bytes;
};

constexpr int64_t kRowsCopied = 2;
constexpr int64_t kPhasesPerLayer = 12;

// Hands out aligned pieces; with base 0 it only measures.
class Cutter {
 public:
  explicit Cutter(uint8_t* base) : base_(base) {}
  template <typename T>
  __attribute__((always_inline)) T* take(int64_t count) {
    T* const out = reinterpret_cast<T*>(base_ + used_);
    used_ += ceil_div(count * static_cast<int64_t>(sizeof(T)), 64) * 64 + 64;
    return out;
  }
  __attribute__((always_inline)) int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

}  // namespace FE_ISA
}  // namespace fastengine
