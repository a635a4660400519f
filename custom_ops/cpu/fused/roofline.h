// What a thread can do at most: the rates that a roofline is drawn from.
#pragma once

#include <cstdint>

namespace fastengine {
namespace FE_ISA {

// Reads all of `data` (a multiple of 256 bytes counts) and returns something that depends on it.
int64_t read_all(const uint8_t* data, int64_t num_bytes);
// Integer multiplications and additions done in `rounds` rounds of independent dot products; without an instruction for them, of the
// cheapest there are, those of 4-bit weights.
int64_t dot_rounds(int64_t rounds);

}  // namespace FE_ISA
}  // namespace fastengine
