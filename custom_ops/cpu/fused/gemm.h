// Panels of a packed GEMM.
#pragma once

#include "activations.h"
#include "layouts.h"

namespace fastengine {
namespace FE_ISA {

// Rows of activations that pass over a panel together: their sums stay in the first-level cache.
constexpr int64_t kChunkTiles = 6;
constexpr int64_t kChunkRows = kChunkTiles * kTileRows;

// Weights are asked for as far ahead as a single row needs, which is through with a block in some ten nanoseconds. What a panel's
// last blocks ask for is the start of the next one, which the same thread takes. A line is asked for with each that is read, as
// bursts of them wait for each other, and into the second level, from which it comes in time.
constexpr int64_t kAskedAhead = 5 * kInt4GroupBytes;
FE_INLINE void ask_ahead(const uint8_t* weights) { _mm_prefetch(reinterpret_cast<const char*>(weights + kAskedAhead), _MM_HINT_T1); }

// out[row][32] = activations of `num_tiles` tiles from `first_tile` on, times one panel; without bias. The
// order of float operations of a row does not depend on which rows are computed with it.
void int8_panel(const uint8_t* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, float* out);
void int4_panel(const uint8_t* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, float* out);
void float_panel(const float* panel, const Activations& a, int64_t first_tile, int64_t num_tiles, int64_t k, float* out);

// Half a panel: 16 columns, of which four k's fill a cache line.
constexpr int64_t kStrip = kPanel / 2;

// What int8_panel() has, bit for bit, of a strip of it and the first tile: out[row][16].
void int8_strip(const uint8_t* panel, int64_t strip, const Activations& a, float* out);

}  // namespace FE_ISA
}  // namespace fastengine
