// The matrix instructions of a warp on the host shim. Layouts as in the PTX manual, "Matrix Fragments for
// mma.m16n8k16 with floating point type" and "ldmatrix":
//
//   lane = 4 * group + pair (group 0-7, pair 0-3); a register holds two neighbours, the lower in its low half
//
//   A [16 rows x 16]   register 0: row group,     columns 2 pair, + 1      1: row group + 8, the same columns
//                      register 2: row group,     columns 2 pair + 8, + 9  3: row group + 8
//   B [16 x 8 columns] register 0: rows 2 pair, + 1 of column group        1: rows 2 pair + 8, + 9
//   D [16 rows x 8]    values 0, 1: row group, columns 2 pair, + 1         2, 3: row group + 8
//   ldmatrix           register m: row group, columns 2 pair, + 1 of matrix m
#pragma once

#include "cuda_language.h"

namespace fastengine {
namespace shim {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Multiply : Collective {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
  float2 (*unpack)(uint32_t);
};

inline void complete_multiply(Collective* const lanes[32]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<Multiply*>(lanes[lane]);
    const int group = lane / 4, pair = lane % 4;
    for (int r = 0; r < 4; ++r) {
      const float2 values = mine.unpack(mine.a[r]);
      const int row = group + 8 * (r % 2), column = 2 * pair + 8 * (r / 2);
      a[row][column] = values.x;
      a[row][column + 1] = values.y;
    }
    for (int r = 0; r < 2; ++r) {
      const float2 values = mine.unpack(mine.b[r]);
      b[2 * pair + 8 * r][group] = values.x;
      b[2 * pair + 8 * r + 1][group] = values.y;
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float* const d = static_cast<Multiply*>(lanes[lane])->d;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      d[i] += sum;
    }
  }
}

inline void multiply(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, float2 (*unpack)(uint32_t)) {
  Multiply mine{{"mma", kAllLanes, {"", 0}, complete_multiply}, d, a, {b0, b1}, unpack};
  warp_operation(&mine);
}

struct MatrixLoad : Collective {
  uint32_t* r;
  const void* row;
  bool transposed;
};

inline void complete_matrix_load(Collective* const lanes[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    const auto& mine = *static_cast<MatrixLoad*>(lanes[lane]);
    for (int m = 0; m < 4; ++m) {
      uint32_t halves[2];
      for (int i = 0; i < 2; ++i) {
        const int row = lane / 4, column = 2 * (lane % 4) + i;
        const int from = mine.transposed ? column : row, at = mine.transposed ? row : column;
        halves[i] = static_cast<const uint16_t*>(static_cast<MatrixLoad*>(lanes[8 * m + from])->row)[at];
      }
      mine.r[m] = halves[0] | halves[1] << 16;
    }
  }
}

inline void load_matrices(uint32_t* r, const void* row, bool transposed) {
  MatrixLoad mine{{"ldmatrix", kAllLanes, {"", 0}, complete_matrix_load}, r, row, transposed};
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix: a row that is not on 16 bytes", {"", 0});
  warp_operation(&mine);
}

}  // namespace shim
}  // namespace fastengine
