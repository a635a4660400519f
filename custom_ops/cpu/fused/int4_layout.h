// Where things lie in a super-block of the 4-bit layout (64 k's of 32 columns); pack.h has the picture.
#pragma once

#include <cstdint>

namespace fastengine {
namespace fused {

constexpr int64_t kInt4BlockBytes = 1216;
constexpr int64_t kInt4Scales = 0;     // u16[2][32]
constexpr int64_t kInt4Offsets = 128;  // u8[2][32]
constexpr int64_t kInt4Nibbles = 192;  // [2][4][2][64]

}  // namespace fused
}  // namespace fastengine
