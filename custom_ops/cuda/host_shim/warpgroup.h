// Matrix products of a warpgroup on the host shim. Layouts as in the PTX manual, "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate": register fragments of wgmma.m64nNk16, strides, the 128-byte swizzle, the matrix descriptor.
//
//   left, in registers  warp w of the four has rows 16 w ..; within these a lane has what it has of mma's A (fragments.h)
//   sums                value 4 n + i: row 16 w + lane / 4 + 8 (i / 2), column 8 n + 2 (lane % 4) + i % 2
//   descriptor          bits 0-13 begin, 16-29 leading, 32-45 stride (all in units of 16 bytes), 49-51 0, 62-63 1: 128-byte swizzle
//   a row is one of M or N (K-major)   row r, value k at (r / 8) stride + (r % 8) 128 + 2 k
//   a row is one of K (MN-major)       value m, row k at (m / 64) leading + 2 (m % 64) + (k / 8) stride + (k % 8) 128
//   swizzle             bits 4-6 of the address are exchanged by its bits 7-9
//
// Each warp computes its own rows, at some time between start and wait; until then its sums are NaN. What hardware would
// not order is an error: copies that nobody published, registers without products_begin(), a wait without a commit.
#pragma once

#include <array>

#include "cuda_language.h"

namespace fastengine {
namespace shim {

// Nothing may rely on where shared memory begins: here at no multiple of 1,024.
constexpr uint32_t kSharedBegin = 1040;

inline uint32_t shared_address(const void* shared) {
  return kSharedBegin + static_cast<uint32_t>(static_cast<const char*>(shared) - static_cast<const char*>(dynamic_shared()));
}

struct Product {
  float* d;  // [columns / 2]
  int columns;
  const uint32_t* left_registers;  // [4], or null
  uint64_t left, right;
  bool across;  // right's rows in memory are those of K
  bool adds;
  float2 (*unpack)(uint32_t);
};

inline uint32_t swizzled_address(uint32_t address) { return address ^ (address >> 7 & 7u) << 4; }

// Value (m, k) of an operand, m counting rows of the left or columns of the right one.
inline uint16_t operand_value(uint64_t descriptor, int m, int k, bool across) {
  const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
  const uint32_t leading = field(16), stride = field(32), row = static_cast<uint32_t>(across ? k : m), value = static_cast<uint32_t>(across ? m : k);
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) fail("wgmma: a descriptor without the 128-byte swizzle, or with a base offset", {"", 0});
  const uint32_t address = swizzled_address(field(0) + row / 8 * stride + row % 8 * 128 + value / 64 * leading + value % 64 * 2);
  if (address < kSharedBegin || address + 2 > kSharedBegin + dynamic_shared_bytes()) fail("wgmma: an operand outside of shared memory", {"", 0});
  if (!is_published((address - kSharedBegin) / 16)) fail("wgmma: reads what was copied and not published to it", {"", 0});
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(dynamic_shared()) + (address - kSharedBegin), 2);
  return bits;
}

struct StartedProduct : Collective {
  Thread* thread;
  Product product;
};
using WarpProduct = std::array<StartedProduct, 32>;

inline void compute_product(const WarpProduct& lanes) {
  const Product& p = lanes[0].product;
  const int first_row = static_cast<int>(lanes[0].thread->linear / 32 % 4) * 16;
  std::vector<float> a(16 * 16), b(static_cast<size_t>(16 * p.columns));
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      uint32_t bits;
      if (p.left_registers != nullptr) {
        // As mma's A: register by the halves of rows and columns, two neighbours in each.
        const uint32_t pair = lanes[static_cast<size_t>(row % 8 * 4 + k % 8 / 2)].product.left_registers[row / 8 + k / 8 * 2];
        bits = k % 2 == 0 ? pair & 0xffff : pair >> 16;
      } else {
        bits = operand_value(p.left, first_row + row, k, false);
      }
      a[static_cast<size_t>(row * 16 + k)] = p.unpack(bits).x;
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < p.columns; ++n) b[static_cast<size_t>(k * p.columns + n)] = p.unpack(operand_value(p.right, n, k, p.across)).x;
  }
  for (const StartedProduct& lane : lanes) {
    std::vector<float>& sums = lane.thread->sums_under_way.at(lane.product.d);
    for (int i = 0; i < p.columns / 2; ++i) {
      const int l = static_cast<int>(lane.thread->linear % 32), row = l / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (l % 4) + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[static_cast<size_t>(row * 16 + k)] * b[static_cast<size_t>(k * p.columns + column)];
      float& mine = sums[static_cast<size_t>(i)];
      mine = p.adds ? mine + sum : sum;
    }
  }
}

inline void complete_start(Collective* const lanes[32]) {
  WarpProduct started;
  for (size_t i = 0; i < 32; ++i) {
    started[i] = *static_cast<StartedProduct*>(lanes[i]);
    const Product& p = started[i].product;
    const Product& first = started[0].product;
    if (p.left != first.left || p.right != first.right || p.adds != first.adds) fail("wgmma: lanes of a warp with different operands", {"", 0});
    Thread* const thread = started[i].thread;
    if (thread->sums_under_way.count(p.d) == 0) {
      thread->sums_under_way[p.d].assign(p.d, p.d + p.columns / 2);
      std::fill(p.d, p.d + p.columns / 2, NAN);
    }
  }
  Thread* const leader = started[0].thread;
  // What adds to earlier sums comes after these.
  if (leader->late_products.empty() && products_are_early()) {
    compute_product(started);
  } else {
    leader->late_products.push_back([started] { compute_product(started); });
  }
}

inline void start_product(const Product& product) {
  if (!current->products_begun) fail("wgmma: registers that nothing orders before it (wgmma.fence)", {"", 0});
  ++current->open_products;
  StartedProduct mine;
  mine.name = "wgmma", mine.mask = 0xffffffffu, mine.site = {"", 0}, mine.complete = complete_start;
  mine.thread = current;
  mine.product = product;
  warp_operation(&mine);
}

struct WaitedProducts : Collective {
  Thread* thread;
};

inline void complete_wait(Collective* const lanes[32]) {
  const auto thread_of = [&](int i) { return static_cast<WaitedProducts*>(lanes[i])->thread; };
  for (const auto& late : thread_of(0)->late_products) late();
  thread_of(0)->late_products.clear();
  for (int i = 0; i < 32; ++i) {
    Thread* const thread = thread_of(i);
    for (const auto& entry : thread->sums_under_way) std::copy(entry.second.begin(), entry.second.end(), entry.first);
    thread->sums_under_way.clear();
    thread->committed_products = 0;
    thread->products_begun = false;
  }
}

inline void products_wait() {
  if (current->open_products > 0) fail("wgmma: waits for products that were not committed", {"", 0});
  WaitedProducts mine;
  mine.name = "wgmma.wait_group", mine.mask = 0xffffffffu, mine.site = {"", 0}, mine.complete = complete_wait;
  mine.thread = current;
  warp_operation(&mine);
}

inline void products_begin() { current->products_begun = true; }
inline void products_commit() {
  current->committed_products += current->open_products;
  current->open_products = 0;
}
inline void publish_to_products() { publish_copies(); }

}  // namespace shim
}  // namespace fastengine
