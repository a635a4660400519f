// Tiles of a packed GEMM.
#pragma once

#include "activations.h"

namespace fastengine {
namespace FE_ISA {

// Bytes of scratch one thread needs for a panel of `linear`, expanded to u8.
FE_INLINE int64_t expanded_panel_bytes(const LinearView& linear) { return linear.padded_k * kPanel; }

// Expands a panel of the 4-bit layout to the int8 layout.
void expand_int4_panel(const uint8_t* panel, int64_t padded_k, uint8_t* out);

// out[row][32] = activations of tile `tile` times one panel, without column scales and bias. `panel` is
// of the int8 layout.
void int8_tile(const uint8_t* panel, const Activations& a, int64_t tile, float* out);
// The same, bit for bit, straight from the 4-bit layout; at most kMaxDirectRows rows.
constexpr int64_t kMaxDirectRows = 4;
void int4_tile(const uint8_t* panel, const Activations& a, int64_t tile, float* out);
void float_tile(const float* panel, const Activations& a, int64_t tile, int64_t k, float* out);

}  // namespace FE_ISA
}  // namespace fastengine
