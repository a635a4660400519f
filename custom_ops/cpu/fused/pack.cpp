#include "pack.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

namespace fastengine {
namespace fused {

Buffer::Buffer(int64_t num_bytes) : size_(num_bytes) {
  constexpr int64_t kHugePage = 2 << 20;
  const bool huge = num_bytes >= kHugePage;
  const int64_t alignment = huge ? kHugePage : 64;
  // Kernels read ahead of what they use: a spare line behind the end.
  const int64_t wanted = (num_bytes + 64 + alignment - 1) / alignment * alignment;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(wanted)));
  if (data_ == nullptr) throw std::bad_alloc();
  if (huge) madvise(data_, static_cast<size_t>(wanted), MADV_HUGEPAGE);
}

Buffer::~Buffer() { std::free(data_); }

namespace {

constexpr int64_t kSourceBlock = 32;

float half_to_float(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
  uint32_t out;
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -value : value;
  }
  out = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  float value;
  std::memcpy(&value, &out, 4);
  return value;
}

int64_t block_bytes(SourceKind kind) {
  switch (kind) {
    case SourceKind::kQ4_0: return 18;
    case SourceKind::kQ4_1: return 20;
    case SourceKind::kQ8_0: return 34;
    case SourceKind::kFloat16: return 64;
    default: return 128;
  }
}

// A block of 32 four-bit weights: w = step * q + base with step >= 0.
struct FourBitBlock {
  float step, base;
  uint8_t q[kSourceBlock];
};

FourBitBlock read_four_bit(const uint8_t* p, SourceKind kind) {
  FourBitBlock block;
  block.step = half_to_float(p);
  block.base = kind == SourceKind::kQ4_1 ? half_to_float(p + 2) : -8.0f * block.step;
  const uint8_t* const nibbles = p + (kind == SourceKind::kQ4_1 ? 4 : 2);
  for (int i = 0; i < 16; ++i) block.q[i] = nibbles[i] & 15, block.q[i + 16] = nibbles[i] >> 4;
  if (block.step < 0) {
    block.base += 15.0f * block.step;
    block.step = -block.step;
    for (uint8_t& q : block.q) q = static_cast<uint8_t>(15 - q);
  }
  return block;
}

float largest(const float* row, int64_t k) {
  float most = 0.0f;
  for (int64_t i = 0; i < k; ++i) most = std::max(most, std::fabs(row[i]));
  return most;
}

uint8_t to_u8(float value) { return static_cast<uint8_t>(std::clamp(std::nearbyint(value) + 128.0f, 0.0f, 255.0f)); }

void pack_float_column(const float* row, int64_t k, float* panel, int64_t column) {
  for (int64_t i = 0; i < k; ++i) panel[i * kPanel + column] = row[i];
}

void pack_int8_column(const float* row, int64_t k, float scale, uint8_t* panel, int64_t column) {
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < k; ++i) panel[i / 4 * kPanel * 4 + column * 4 + i % 4] = to_u8(row[i] * inverse);
}

// Puts the nibble of (k inside the super-block, column) where pack.h says.
void put_nibble(uint8_t* nibbles, int64_t k, int64_t column, uint8_t q) {
  const int64_t half = k / 32, pair = k % 32 / 8, is_b = k % 8 / 4, vector = column / 16;
  const int64_t byte = (column % 16 * 4 + k % 4) ^ 1;
  nibbles[((half * 4 + pair) * 2 + vector) * 64 + byte] |= static_cast<uint8_t>(q << (4 * is_b));
}

// Integer factor and offset with (q * factor >> 8) + offset close to `target` of every q of a block.
struct Expansion {
  int64_t factor, offset;
};

// Squared errors, and above all their sum: activations of a block are not free of a common part, which
// an error common to the block's weights would multiply.
float expansion_error(const FourBitBlock& block, const float* target, Expansion e) {
  constexpr float kBiasWeight = 1.0f;
  float squares = 0.0f, sum = 0.0f;
  for (int64_t i = 0; i < kSourceBlock; ++i) {
    const float error = target[i] - static_cast<float>((block.q[i] * static_cast<int32_t>(e.factor) >> 8) + static_cast<int32_t>(e.offset));
    squares += error * error;
    sum += error;
  }
  return squares + kBiasWeight * sum * sum;
}

Expansion fit_expansion(const FourBitBlock& block, float inverse) {
  float target[kSourceBlock];
  float mean_target = 0.0f, mean_q = 0.0f;
  int64_t top_q = 0;
  for (int64_t i = 0; i < kSourceBlock; ++i) {
    target[i] = (block.step * static_cast<float>(block.q[i]) + block.base) * inverse + 128.0f;
    mean_target += target[i] / kSourceBlock;
    mean_q += static_cast<float>(block.q[i]) / kSourceBlock;
    top_q = std::max<int64_t>(top_q, block.q[i]);
  }
  constexpr float kFloorLoss = 0.498f;  // what rounding down takes on average
  const float factor = 256.0f * block.step * inverse;
  const int64_t middle = std::llround(mean_target + kFloorLoss - factor / 256.0f * mean_q);
  Expansion best{0, 128};
  float least = 3.0e38f;
  for (int64_t offset = middle - 1; offset <= middle + 1; ++offset) {
    // The factor that leaves no common error beside this offset.
    const float balanced = mean_q > 0.5f ? 256.0f * (mean_target + kFloorLoss - static_cast<float>(offset)) / mean_q : factor;
    for (int64_t step = -2; step <= 3; ++step) {
      const int64_t candidate = std::clamp<int64_t>(step == 3 ? std::llround(factor) : std::llround(balanced) + 2 * step, 0, 65535 / 15);
      const Expansion e{candidate, std::clamp<int64_t>(offset, 0, std::max<int64_t>(0, 255 - (top_q * candidate >> 8)))};
      const float error = expansion_error(block, target, e);
      if (error < least) least = error, best = e;
    }
  }
  return best;
}

void pack_int4_block(const FourBitBlock& block, float scale, uint8_t* super_block, int64_t half, int64_t column) {
  const Expansion e = fit_expansion(block, 1.0f / scale);
  const uint16_t stored = static_cast<uint16_t>(e.factor);
  std::memcpy(super_block + kInt4Scales + (half * kPanel + column) * 2, &stored, 2);
  super_block[kInt4Offsets + half * kPanel + column] = static_cast<uint8_t>(e.offset);
  for (int64_t i = 0; i < kSourceBlock; ++i) put_nibble(super_block + kInt4Nibbles, half * kSourceBlock + i, column, block.q[i]);
}

// Column whose weights are all zero: bytes of 128.
void pack_empty_column(Linear* linear, uint8_t* panel, int64_t column) {
  if (linear->shape.layout == Layout::kInt8) {
    for (int64_t i = 0; i < linear->shape.padded_k; ++i) panel[i / 4 * kPanel * 4 + column * 4 + i % 4] = 128;
  } else if (linear->shape.layout == Layout::kInt4) {
    for (int64_t b = 0; b < linear->shape.padded_k / kBlockK; ++b) {
      for (int64_t half = 0; half < 2; ++half) panel[b * kInt4BlockBytes + kInt4Offsets + half * kPanel + column] = 128;
    }
  }
}

struct SourceRow {
  const uint8_t* data = nullptr;
  SourceKind kind = SourceKind::kFloat32;
};

void pack_column(Linear* linear, const SourceRow& source, int64_t n) {
  uint8_t* const panel = linear->weights.data() + n / kPanel * linear->shape.panel_bytes;
  const int64_t column = n % kPanel, k = linear->shape.k;
  pack_empty_column(linear, panel, column);
  if (source.data == nullptr) return;
  std::vector<float> row(static_cast<size_t>(k));
  decode_row(source.data, source.kind, k, row.data());
  if (linear->shape.layout == Layout::kFloat32) return pack_float_column(row.data(), k, reinterpret_cast<float*>(panel), column);
  const float scale = std::max(largest(row.data(), k) / 127.0f, 1e-20f);
  linear->scales[static_cast<size_t>(n)] = scale;
  if (linear->shape.layout == Layout::kInt8) return pack_int8_column(row.data(), k, scale, panel, column);
  for (int64_t b = 0; b < k / kSourceBlock; ++b) {
    const FourBitBlock block = read_four_bit(source.data + b * block_bytes(source.kind), source.kind);
    pack_int4_block(block, scale, panel + b / 2 * kInt4BlockBytes, b % 2, column);
  }
}

std::vector<SourceRow> source_rows(const std::vector<WeightPart>& parts, int64_t k, bool paired) {
  std::vector<SourceRow> rows;
  for (const WeightPart& part : parts) {
    const int64_t bytes = row_bytes(part.kind, k);
    for (int64_t r = 0; r < part.rows; ++r) rows.push_back({part.data + (part.order != nullptr ? part.order[r] : r) * bytes, part.kind});
  }
  if (!paired) return rows;
  const int64_t half = static_cast<int64_t>(rows.size()) / 2, padded = (half + 15) / 16 * 16;
  std::vector<SourceRow> mixed(static_cast<size_t>(2 * padded));
  for (int64_t r = 0; r < half; ++r) {
    const size_t target = static_cast<size_t>(r / 16 * kPanel + r % 16);
    mixed[target] = rows[static_cast<size_t>(r)];
    mixed[target + 16] = rows[static_cast<size_t>(half + r)];
  }
  return mixed;
}

int64_t bytes_per_panel(Layout layout, int64_t padded_k) {
  switch (layout) {
    case Layout::kFloat32: return padded_k * kPanel * 4;
    case Layout::kInt8: return padded_k * kPanel;
    default: return padded_k / kBlockK * kInt4BlockBytes;
  }
}

}  // namespace

int64_t row_bytes(SourceKind kind, int64_t k) {
  if (kind == SourceKind::kFloat32) return 4 * k;
  if (kind == SourceKind::kFloat16) return 2 * k;
  if (k % kSourceBlock != 0) throw std::invalid_argument("rows of " + std::to_string(k) + " weights are no multiple of the block of 32");
  return k / kSourceBlock * block_bytes(kind);
}

void decode_row(const uint8_t* row, SourceKind kind, int64_t k, float* out) {
  if (kind == SourceKind::kFloat32) {
    std::memcpy(out, row, static_cast<size_t>(k) * 4);
    return;
  }
  if (kind == SourceKind::kFloat16) {
    for (int64_t i = 0; i < k; ++i) out[i] = half_to_float(row + 2 * i);
    return;
  }
  for (int64_t b = 0; b < k / kSourceBlock; ++b, row += block_bytes(kind), out += kSourceBlock) {
    if (kind == SourceKind::kQ8_0) {
      const float step = half_to_float(row);
      for (int i = 0; i < kSourceBlock; ++i) out[i] = step * static_cast<float>(static_cast<int8_t>(row[2 + i]));
    } else {
      const FourBitBlock block = read_four_bit(row, kind);
      for (int i = 0; i < kSourceBlock; ++i) out[i] = block.step * static_cast<float>(block.q[i]) + block.base;
    }
  }
}

Linear pack_linear(const std::vector<WeightPart>& parts, int64_t k, Layout layout, int64_t group, bool paired, const float* bias) {
  for (const WeightPart& part : parts) {
    const bool four_bit = part.kind == SourceKind::kQ4_0 || part.kind == SourceKind::kQ4_1;
    if (layout == Layout::kInt4 && !four_bit) throw std::invalid_argument("the 4-bit layout takes Q4_0 and Q4_1 weights only");
  }
  if (paired && (parts.size() != 2 || parts[0].rows != parts[1].rows)) throw std::invalid_argument("paired packing takes two parts of equal size");
  const std::vector<SourceRow> rows = source_rows(parts, k, paired);
  Linear linear;
  LinearView& shape = linear.shape;
  shape.layout = layout;
  shape.n = static_cast<int64_t>(rows.size());
  shape.k = k;
  shape.padded_k = (k + kBlockK - 1) / kBlockK * kBlockK;
  shape.num_panels = (shape.n + kPanel - 1) / kPanel;
  shape.group = group;
  if (group % 32 != 0 || shape.padded_k % group != 0) {
    throw std::invalid_argument("activation groups must be multiples of 32 that divide " + std::to_string(shape.padded_k));
  }
  shape.panel_bytes = bytes_per_panel(layout, shape.padded_k);
  linear.weights = Buffer(shape.num_panels * shape.panel_bytes);
  linear.scales.assign(static_cast<size_t>(shape.num_panels * kPanel), 0.0f);
  if (bias != nullptr) {
    linear.bias.assign(static_cast<size_t>(linear.shape.num_panels * kPanel), 0.0f);
    for (int64_t n = 0; n < linear.shape.n; ++n) {
      const int64_t half = linear.shape.n / 2;
      const int64_t source = paired ? (n % kPanel < 16 ? 0 : half) + n / kPanel * 16 + n % 16 : n;
      linear.bias[static_cast<size_t>(n)] = bias[source];
    }
  }
  // Each thread packs whole panels, so that the pages of a panel are first touched together.
  const auto pack_panels = [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      std::memset(linear.weights.data() + p * linear.shape.panel_bytes, 0, static_cast<size_t>(linear.shape.panel_bytes));
      for (int64_t n = p * kPanel; n < (p + 1) * kPanel; ++n) pack_column(&linear, n < linear.shape.n ? rows[static_cast<size_t>(n)] : SourceRow(), n);
    }
  };
  const int64_t num_threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, linear.shape.num_panels);
  std::vector<std::thread> threads;
  for (int64_t t = 1; t < num_threads; ++t) {
    threads.emplace_back(pack_panels, linear.shape.num_panels * t / num_threads, linear.shape.num_panels * (t + 1) / num_threads);
  }
  pack_panels(0, linear.shape.num_panels / num_threads);
  for (std::thread& thread : threads) thread.join();
  return linear;
}

void unpack_row(const Linear& linear, int64_t n, float* out) {
  const uint8_t* const panel = linear.weights.data() + n / kPanel * linear.shape.panel_bytes;
  const int64_t column = n % kPanel;
  if (linear.shape.layout == Layout::kFloat32) {
    for (int64_t i = 0; i < linear.shape.k; ++i) out[i] = reinterpret_cast<const float*>(panel)[i * kPanel + column];
    return;
  }
  const float scale = linear.scales[static_cast<size_t>(n)];
  if (linear.shape.layout == Layout::kInt8) {
    for (int64_t i = 0; i < linear.shape.k; ++i) out[i] = scale * static_cast<float>(panel[i / 4 * kPanel * 4 + column * 4 + i % 4] - 128);
    return;
  }
  for (int64_t i = 0; i < linear.shape.k; ++i) {
    const uint8_t* const block = panel + i / kBlockK * kInt4BlockBytes;
    const int64_t k = i % kBlockK, half = k / 32, byte = (column % 16 * 4 + k % 4) ^ 1;
    const uint8_t pair = block[kInt4Nibbles + ((half * 4 + k % 32 / 8) * 2 + column / 16) * 64 + byte];
    const int64_t q = k % 8 < 4 ? pair & 15 : pair >> 4;
    uint16_t factor;
    std::memcpy(&factor, block + kInt4Scales + (half * kPanel + column) * 2, 2);
    out[i] = scale * static_cast<float>((q * factor >> 8) + block[kInt4Offsets + half * kPanel + column] - 128);
  }
}

}  // namespace fused
}  // namespace fastengine
