// Runs a packed GEMM over a team's threads, with an epilogue for each finished tile.
#pragma once

#include "gemm.h"
#include "team.h"

namespace fastengine {
namespace FE_ISA {

// out[rows][32] of one panel and tile; `expanded` holds the panel as u8 where the layout needs it.
FE_INLINE void compute_tile(const LinearView& w, const Activations& a, int64_t panel, int64_t tile, bool direct, const uint8_t* expanded, float* out) {
  const uint8_t* const weights = w.weights + panel * w.panel_bytes;
  if (w.layout == Layout::kFloat32) {
    float_tile(reinterpret_cast<const float*>(weights), a, tile, w.k, out);
  } else if (direct) {
    int4_tile(weights, a, tile, out);
  } else {
    int8_tile(w.layout == Layout::kInt8 ? weights : expanded, a, tile, out);
  }
}

// Column scales and bias, in place.
FE_INLINE void finish_tile(const LinearView& w, int64_t panel, int64_t num_rows, float* out) {
  for (int64_t v = 0; v < kPanel; v += kLanes) {
    const Vec scale = w.layout == Layout::kFloat32 ? vset(1.0f) : vload(w.scales + panel * kPanel + v);
    const Vec bias = w.bias != nullptr ? vload(w.bias + panel * kPanel + v) : vzero();
    for (int64_t r = 0; r < num_rows; ++r) {
      float* const target = out + r * kPanel + v;
      vstore(target, w.bias != nullptr ? vfma(vload(target), scale, bias) : vmul(vload(target), scale));
    }
  }
}

// Calls epilogue(first_row, num_rows, panel, values) once per tile of every panel; values is
// [num_rows][kPanels][32] of the kPanels panels from `panel` on, which one thread computes together.
template <int kPanels, typename Epilogue>
FE_INLINE void run_gemm(Member& me, const LinearView& w, const Activations& a, uint8_t* scratch, const Epilogue& epilogue) {
  const int64_t num_tasks = ceil_div(w.num_panels, kPanels), num_tiles = ceil_div(a.num_rows, kTileRows);
  const bool direct = w.layout == Layout::kInt4 && a.num_rows <= kMaxDirectRows;
  const int64_t grain = max_i(1, num_tasks / (8 * me.team->num_threads));
  for_tasks(me, num_tasks, grain, [&](int64_t first, int64_t last) {
    alignas(64) float values[kPanels][kTileRows * kPanel];
    for (int64_t task = first; task < last; ++task) {
      const int64_t panel = task * kPanels, num_panels = min_i(kPanels, w.num_panels - panel);
      if (w.layout == Layout::kInt4 && !direct) {
        for (int64_t p = 0; p < num_panels; ++p) {
          expand_int4_panel(w.weights + (panel + p) * w.panel_bytes, w.padded_k, scratch + p * expanded_panel_bytes(w));
        }
      }
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t num_rows = rows_of_tile(a.num_rows, tile);
        for (int64_t p = 0; p < num_panels; ++p) {
          compute_tile(w, a, panel + p, tile, direct, scratch + p * expanded_panel_bytes(w), values[p]);
          finish_tile(w, panel + p, num_rows, values[p]);
        }
        epilogue(tile * kTileRows, num_rows, panel, values);
      }
    }
  });
}

}  // namespace FE_ISA
}  // namespace fastengine
