// Heads of queries, keys and values as they leave their GEMM, for an int8 cache: normed, rotated, in eight bits, where
// attention reads them.
#pragma once

#include "attention.h"
#include "gemm.h"

namespace fastengine {
namespace FE_ISA {

constexpr int64_t kMostHeadDim = 128;

struct HeadTarget {
  KvLayer cache;
  NewRows rows;
  FinishedQueries queries;
  int64_t num_heads;
  float score_scale;
};

// Asks for the memory that finish_head() writes of the same rows.
void expect_head(const HeadTarget& target, int64_t head, const int32_t* tokens, int64_t first, int64_t num_rows);
// Rows [first, first + num_rows) of `head`, counted through queries, keys and values, which lie in head_dim / 32 panels
// [num_rows][32]. They belong to tokens[row], or with null to those of their own number.
void finish_head(const HeadTarget& target, int64_t head, const int32_t* tokens, int64_t first, int64_t num_rows, const float (*panels)[kChunkRows * kPanel]);

}  // namespace FE_ISA
}  // namespace fastengine
