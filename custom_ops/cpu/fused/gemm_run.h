// Runs a packed GEMM over a team's threads, with an epilogue for each finished part.
#pragma once

#include "gemm.h"
#include "team.h"

namespace fastengine {
namespace FE_ISA {

FE_INLINE void compute_panel(const LinearView& w, const Activations& a, int64_t panel, int64_t first_tile, int64_t num_tiles, float* out) {
  const uint8_t* const weights = w.weights + panel * w.panel_bytes;
  if (w.layout == Layout::kFloat32) {
    float_panel(reinterpret_cast<const float*>(weights), a, first_tile, num_tiles, w.k, out);
  } else if (w.layout == Layout::kInt8) {
    int8_panel(weights, a, first_tile, num_tiles, out);
  } else {
    int4_panel(weights, a, first_tile, num_tiles, out);
  }
}

FE_INLINE void add_bias(const float* bias, int64_t num_rows, float* out) {
  for (int64_t v = 0; v < kPanel; v += kLanes) {
    const Vec value = vload(bias + v);
    for (int64_t r = 0; r < num_rows; ++r) vstore(out + r * kPanel + v, vadd(vload(out + r * kPanel + v), value));
  }
}

// Where one row's part of a panel is going to be written.
FE_INLINE void expect_write(const float* p) {
  __builtin_prefetch(p, 1);
  __builtin_prefetch(p + kPanel / 2, 1);
}

// Of at least as many tiles a thread, each has rows of its own, and reads all weights: what one phase leaves in its caches for the next
// then stays there, and phases end together. Of fewer it has panels of its own, for all rows.
constexpr int64_t kTilesOfOwn = 4;

// `scratch`: of this thread, for sum_pairs_bytes() of the activations.
// Calls epilogue(first_row, num_rows, panel, values) for up to kChunkRows rows of every panel; values is
// [kPanels][num_rows][32] of the kPanels panels from `panel` on, which one thread computes together.
// expect(first_row, num_rows, panel) comes before, and may ask for the memory that the epilogue writes.
// kSplitsRows: rows are shared out whenever there are more than a thread computes together: for a linear of few panels.
template <int kPanels, bool kSplitsRows = false, typename Expect, typename Epilogue>
FE_INLINE void run_gemm(Member& me, const LinearView& w, Activations a, uint8_t* scratch, const Expect& expect, const Epilogue& epilogue) {
  const int64_t num_tiles = ceil_div(a.num_rows, kTileRows), num_threads = me.team->num_threads;
  const bool owns_rows = num_tiles >= kTilesOfOwn * num_threads;
  const int64_t num_chunks = owns_rows ? ceil_div(num_tiles, num_threads * kChunkTiles) * num_threads : kSplitsRows ? ceil_div(num_tiles, kChunkTiles) : 1;
  const int64_t num_parts = ceil_div(w.num_panels, kPanels);
  // By a thread that has something to do: one that comes too late may find the next phase's activations.
  bool has_pairs = w.layout != Layout::kInt4;
  for_tasks(me, num_chunks * num_parts, 1, [&](int64_t first, int64_t last) {
    if (!has_pairs) make_sum_pairs(&a, scratch);
    has_pairs = true;
    alignas(64) float values[kPanels][kChunkRows * kPanel];
    for (int64_t task = first; task < last; ++task) {
      const int64_t panel = task % num_parts * kPanels, num_panels = min_i(kPanels, w.num_panels - panel), chunk = task / num_parts;
      const int64_t first_tile = num_tiles * chunk / num_chunks, end_tile = num_tiles * (chunk + 1) / num_chunks;
      for (int64_t tile = first_tile; tile < end_tile; tile += kChunkTiles) {
        const int64_t tiles = min_i(kChunkTiles, end_tile - tile), num_rows = min_i(tiles * kTileRows, a.num_rows - tile * kTileRows);
        expect(tile * kTileRows, num_rows, panel);
        for (int64_t p = 0; p < num_panels; ++p) {
          compute_panel(w, a, panel + p, tile, tiles, values[p]);
          if (w.bias != nullptr) add_bias(w.bias + (panel + p) * kPanel, num_rows, values[p]);
        }
        epilogue(tile * kTileRows, num_rows, panel, values);
      }
    }
  });
}

}  // namespace FE_ISA
}  // namespace fastengine
