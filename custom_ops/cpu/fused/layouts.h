// Where things lie in a block of 32 k's by 32 columns; pack.h has the picture.
#pragma once

#include <cstdint>

namespace fastengine {
namespace fused {

constexpr int64_t kScalesAt = 0;  // f16[32]
constexpr int64_t kInt8BlockBytes = 1088, kInt8ValuesAt = 64;                          // u8[8][32][4]
constexpr int64_t kInt4BlockBytes = 640, kInt4MinimaAt = 64, kInt4NibblesAt = 128;  // f16[32], u8[4][32][4]

}  // namespace fused
}  // namespace fastengine
