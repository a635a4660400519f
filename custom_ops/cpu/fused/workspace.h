// The step's memory: one allocation, cut into the arrays of each phase.
#pragma once

#include "activations.h"
#include "attention_plan.h"
#include "gemm.h"
#include "team.h"

namespace fastengine {
namespace FE_ISA {

// What becomes of a number of rows in a layer.
struct RowSet {
  int64_t num_rows;
  float* x;         // [num_rows][hidden]: the residual stream
  float* attended;  // [num_rows][num_heads * head_dim]
  float* gated;     // [num_rows][intermediate rounded up]: silu(gate) * up, where it is not quantized at once
  // Of few rows, every thread makes a copy of `input` and `context`, which lie `copy_bytes` apart: that is
  // quicker than to wait for each other. 0: there is one, made together.
  Activations input, context, product;
  int64_t copy_bytes;
  AttentionPlan plan;
  uint32_t* arrived;  // [layers][splits]
  float* partials;    // of the splits
};

// What head.cpp knows of a few greedy rows.
struct Screening {
  bool used;
  float *shifts, *energies;  // [blocks][R]
  float *scales, *rounded;   // [R]
  int64_t* outliers;         // [R]: blocks
  float *likely, *highest;  // [R][strips]: the largest coarse logit, and the largest that the exact ones may be
};

struct Workspace {
  Team* team;
  // QKV's heads are finished where they are computed: rotated, in eight bits, keys and values in the cache. Else its rows are kept.
  bool finishes_heads;
  FinishedQueries queries;  // of up to T rows
  float* qkv;  // [T][qkv_stride]
  RowSet all;  // T rows
  // The rows that get logits or hidden states: nobody reads the last layer's output of the others, whose keys and values are
  // stored and that is all. As `all` where that can't be told apart.
  RowSet last;
  bool last_is_apart;
  float* samples;    // [R][hidden]: rows that get logits, after the last norm
  Activations head;  // and as the LM head reads them
  Screening screening;
  uint8_t* scratch;  // [threads][scratch_bytes]
  int64_t scratch_bytes;
  float* best_values;  // [threads][R]
  int32_t* best_ids;   // [threads][R]
  int64_t qkv_stride, gated_stride, num_bytes;
};

// The same memory in the form that one linear reads.
FE_INLINE Activations for_linear(const Activations& a, const LinearView& w) {
  Activations out = a;
  out.quantized = w.layout != Layout::kFloat32;
  out.group_blocks = w.group_blocks;
  return out;
}

// Lays the arrays of a step out from `base` on; null: only finds out how many bytes they take.
Workspace cut(const ModelView& m, const StepArgs& s, int num_threads, uint8_t* base);

}  // namespace FE_ISA
}  // namespace fastengine
