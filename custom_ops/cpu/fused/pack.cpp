#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fastengine {
namespace fused {

namespace {

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
    case SourceKind::kFloat16:
    case SourceKind::kBfloat16: return 64;
    default: return 128;
  }
}

// Rounds to nearest even; what is too large becomes infinite.
uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const float size = std::fabs(value);
  if (!(size < 65520.0f)) return static_cast<uint16_t>(sign | (std::isnan(value) ? 0x7e00u : 0x7c00u));
  if (size < 6.103515625e-5f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(size * 16777216.0f)));
  bits &= 0x7fffffffu;
  bits += 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)));
}

float rounded_to_half(float value) {
  const uint16_t bits = float_to_half(value);
  return half_to_float(reinterpret_cast<const uint8_t*>(&bits));
}

// A column's part of a block: w = step * q + base, q in [0, 15] or, with base 0, in [-127, 127].
struct QuantizedBlock {
  float step, base;
  int8_t q[kBlockK];
};

// A column's part of a group: w = scale * step * q + base of its block, q in [0, 15].
struct QuantizedGroup {
  float scale;
  int step[2];
  float base[2];
  int8_t q[2][kBlockK];
};

QuantizedBlock read_four_bit(const uint8_t* p, SourceKind kind, bool is_signed) {
  QuantizedBlock block;
  block.step = half_to_float(p);
  const int shift = is_signed ? 8 : 0;
  block.base = kind == SourceKind::kQ4_1 ? half_to_float(p + 2) : is_signed ? 0.0f : -8.0f * block.step;
  const uint8_t* const nibbles = p + (kind == SourceKind::kQ4_1 ? 4 : 2);
  for (int i = 0; i < 16; ++i) block.q[i] = static_cast<int8_t>((nibbles[i] & 15) - shift), block.q[i + 16] = static_cast<int8_t>((nibbles[i] >> 4) - shift);
  return block;
}

QuantizedBlock read_eight_bit(const uint8_t* p) {
  QuantizedBlock block;
  block.step = half_to_float(p);
  block.base = 0.0f;
  std::memcpy(block.q, p + 2, kBlockK);
  return block;
}

// A value that is not finite makes the scale so, and with it every result.
QuantizedBlock round_to_four_bits(const float* x) {
  float low = x[0], high = x[0], finite = 0.0f;
  for (int i = 0; i < kBlockK; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]), finite += x[i] * 0.0f;
  QuantizedBlock block{rounded_to_half((high - low) / 15.0f) + finite, rounded_to_half(low), {}};
  const float inverse = block.step > 0 ? 1.0f / block.step : 0.0f;
  for (int i = 0; i < kBlockK; ++i) block.q[i] = static_cast<int8_t>(std::fmin(std::fmax(std::nearbyint((x[i] - block.base) * inverse), 0.0f), 15.0f));
  return block;
}

QuantizedBlock round_to_eight_bits(const float* x) {
  float most = 0.0f, finite = 0.0f;
  for (int i = 0; i < kBlockK; ++i) most = std::max(most, std::fabs(x[i])), finite += x[i] * 0.0f;
  QuantizedBlock block{rounded_to_half(most / 127.0f) + finite, 0.0f, {}};
  const float inverse = block.step > 0 ? 1.0f / block.step : 0.0f;
  for (int i = 0; i < kBlockK; ++i) block.q[i] = static_cast<int8_t>(std::fmin(std::fmax(std::nearbyint(x[i] * inverse), -127.0f), 127.0f));
  return block;
}

// Nibbles and base of a block whose step is given, for the least squares: near to those of the start.
void fit(const float* weights, float step, float* base, int8_t* q) {
  constexpr int kRounds = 2;
  for (int round = 0; round < kRounds; ++round) {
    float rest = 0.0f;
    for (int i = 0; i < kBlockK; ++i) {
      q[i] = static_cast<int8_t>(step > 0.0f ? std::fmin(std::fmax(std::nearbyint((weights[i] - *base) / step), 0.0f), 15.0f) : 0.0f);
      rest += weights[i] - step * static_cast<float>(q[i]);
    }
    *base = rest / kBlockK;
  }
}

// Two blocks with integer steps and one scale, of all steps those that fit both best. A value that is not finite makes the scale so.
QuantizedGroup in_group(const QuantizedBlock* blocks) {
  float weights[2][kBlockK], energy[2], step[2];
  for (int h = 0; h < 2; ++h) {
    float mean = 0.0f, squares = 0.0f;
    for (int i = 0; i < kBlockK; ++i) mean += static_cast<float>(blocks[h].q[i]) / kBlockK;
    for (int i = 0; i < kBlockK; ++i) squares += (static_cast<float>(blocks[h].q[i]) - mean) * (static_cast<float>(blocks[h].q[i]) - mean);
    for (int i = 0; i < kBlockK; ++i) weights[h][i] = blocks[h].step * static_cast<float>(blocks[h].q[i]) + blocks[h].base;
    energy[h] = squares + 1e-3f, step[h] = std::fabs(blocks[h].step);
  }
  QuantizedGroup group{};
  const int larger = step[1] > step[0] ? 1 : 0, smaller = 1 - larger;
  const float finite = (step[0] + step[1] + blocks[0].base + blocks[1].base) * 0.0f;
  float least = std::numeric_limits<float>::infinity();
  const auto try_steps = [&](const int (&steps)[2]) {
    float product = 0.0f, square = 0.0f, error = 0.0f;
    for (int h = 0; h < 2; ++h) product += static_cast<float>(steps[h]) * step[h] * energy[h], square += static_cast<float>(steps[h] * steps[h]) * energy[h];
    const float scale = rounded_to_half(product / square);
    for (int h = 0; h < 2; ++h) error += (step[h] - scale * static_cast<float>(steps[h])) * (step[h] - scale * static_cast<float>(steps[h])) * energy[h];
    if (error < least) least = error, group.scale = scale, group.step[0] = steps[0], group.step[1] = steps[1];
  };
  for (int most = 1; step[larger] > 0.0f && most <= kMostStep; ++most) {
    const int below = static_cast<int>(step[smaller] / step[larger] * static_cast<float>(most));
    for (int other = below; other <= below + 1; ++other) {
      int steps[2];
      steps[larger] = most, steps[smaller] = step[smaller] > 0.0f ? std::min(std::max(other, 1), kMostStep) : 0;
      try_steps(steps);
    }
  }
  for (int h = 0; h < 2; ++h) {
    group.base[h] = std::min(blocks[h].base, blocks[h].base + 15.0f * blocks[h].step);  // that of a negative step lies at its other end
    fit(weights[h], group.scale * static_cast<float>(group.step[h]), &group.base[h], group.q[h]);
  }
  group.scale += group.scale * 0.0f + finite;
  return group;
}

// The nearest half that is not below `value` >= 0.
float half_above(float value) {
  const uint16_t bits = float_to_half(value), next = static_cast<uint16_t>(bits + 1);
  const float nearest = half_to_float(reinterpret_cast<const uint8_t*>(&bits));
  return nearest < value ? half_to_float(reinterpret_cast<const uint8_t*>(&next)) : nearest;
}

// Of weights at and above each block's base: no value is cut off; see derive_screen(). What a half can't hold makes the scale a NaN,
// and with it the result.
QuantizedGroup dithered_group(const float* x, const float* bases, const float* dithers) {
  // Of nearly equal weights too the step is above what float operations round.
  constexpr float kLeastStep = 1.0f / 1024.0f;
  float least[2], finite = 0.0f;
  for (int h = 0; h < 2; ++h) {
    float high = x[h * kBlockK], most = 0.0f;
    for (int i = h * kBlockK; i < (h + 1) * kBlockK; ++i) high = std::max(high, x[i]), most = std::max(most, std::fabs(x[i])), finite += x[i] * 0.0f;
    least[h] = std::max((high - bases[h]) / 15.0f, most * kLeastStep);
  }
  QuantizedGroup group{};
  const float larger = std::max(least[0], least[1]);
  float smallest = std::numeric_limits<float>::infinity();
  for (int most = (kMostStep + 1) / 2; larger > 0.0f && most <= kMostStep; ++most) {
    const float scale = half_above(larger / static_cast<float>(most));
    int candidate[2];
    float variance = 0.0f;
    for (int h = 0; h < 2; ++h) {
      candidate[h] = static_cast<int>(std::ceil(least[h] / scale));
      variance += scale * scale * static_cast<float>(candidate[h] * candidate[h]);
    }
    if (candidate[0] <= kMostStep && candidate[1] <= kMostStep && variance < smallest) smallest = variance, group.scale = scale, group.step[0] = candidate[0], group.step[1] = candidate[1];
  }
  for (int h = 0; h < 2; ++h) {
    const float step = group.scale * static_cast<float>(group.step[h]), inverse = step > 0 ? 1.0f / step : 0.0f;
    group.base[h] = bases[h];
    for (int i = 0; i < kBlockK; ++i) {
      group.q[h][i] = static_cast<int8_t>(std::fmin(std::fmax(std::nearbyint((x[h * kBlockK + i] - bases[h]) * inverse + dithers[h * kBlockK + i]), 0.0f), 15.0f));
    }
  }
  group.scale += group.scale * 0.0f + finite;
  return group;
}

void put_half(uint8_t* target, int64_t column, float value) {
  const uint16_t bits = float_to_half(value);
  std::memcpy(target + column * 2, &bits, 2);
}

void put_int8_block(const QuantizedBlock& block, uint8_t* target, int64_t column) {
  put_half(target + kScalesAt, column, block.step);
  for (int64_t i = 0; i < kBlockK; ++i) target[kInt8ValuesAt + (i / 4 * kPanel + column) * 4 + i % 4] = static_cast<uint8_t>(block.q[i] + 128);
}

void put_int4_group(const QuantizedGroup& group, uint8_t* panel, int64_t g, int64_t num_groups, int64_t column) {
  uint8_t* const target = panel + int4_groups_at(num_groups) + g * kInt4GroupBytes;
  put_half(target + kScalesAt, column, group.scale);
  for (int64_t i = 0; i < kBlockK; ++i) target[kInt4NibblesAt + (i / 4 * kPanel + column) * 4 + i % 4] = static_cast<uint8_t>(group.q[0][i] | group.q[1][i] << 4);
  panel[int4_steps_at(num_groups) + g * kPanel + column] = static_cast<uint8_t>(group.step[0] | group.step[1] << 4);
}

// Byte of a column's minimum of block b in its panel.
int64_t minimum_at(int64_t b, int64_t column) { return kInt4MinimaAt + b / 2 * kInt4PairBytes + column * 4 + b % 2 * 2; }

// A column's minima are multiples of this. One that is not finite makes it so.
float unit_of(const std::vector<float>& minima) {
  float most = 0.0f, finite = 0.0f;
  for (const float minimum : minima) most = std::max(most, std::fabs(minimum)), finite += minimum * 0.0f;
  return most / static_cast<float>(kMostMinimum) + finite;
}

void put_minimum(float multiple, uint8_t* panel, int64_t b, int64_t column) {
  const float limit = static_cast<float>(kMostMinimum);
  const auto stored = static_cast<int16_t>(std::fmin(std::fmax(multiple, -limit), limit));
  std::memcpy(panel + minimum_at(b, column), &stored, sizeof(stored));
}

void put_minima(const std::vector<float>& minima, uint8_t* panel, int64_t column) {
  const float unit = unit_of(minima), inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
  std::memcpy(panel + column * 4, &unit, sizeof(unit));
  for (size_t b = 0; b < minima.size(); ++b) put_minimum(std::nearbyint(minima[b] * inverse), panel, static_cast<int64_t>(b), column);
}

// The column's part of a screen from its weights, whole groups of them: minima that are exact multiples, not above any weight.
void screen_column(const std::vector<float>& weights, const std::vector<float>& dithers, uint8_t* panel, int64_t column) {
  const size_t num_blocks = weights.size() / kBlockK;
  std::vector<float> lows(num_blocks);
  float finite = 0.0f;
  for (size_t b = 0; b < num_blocks; ++b) lows[b] = *std::min_element(&weights[b * kBlockK], &weights[b * kBlockK] + kBlockK);
  for (const float weight : weights) finite += weight * 0.0f;
  const float unit = unit_of(lows) * 1.001f + finite;  // the most negative one is not cut off when it is rounded down
  std::memcpy(panel + column * 4, &unit, sizeof(unit));
  for (size_t b = 0; b < num_blocks; ++b) {
    const float multiple = unit > 0.0f ? std::floor(lows[b] / unit) : 0.0f;
    put_minimum(multiple, panel, static_cast<int64_t>(b), column);
    lows[b] = unit * multiple;
  }
  for (size_t b = 0; b < num_blocks; b += 2) {
    const QuantizedGroup group = dithered_group(&weights[b * kBlockK], &lows[b], &dithers[b * kBlockK]);
    put_int4_group(group, panel, static_cast<int64_t>(b / 2), static_cast<int64_t>(num_blocks / 2), column);
  }
}

void pack_float_column(const float* row, int64_t k, float* panel, int64_t column) {
  for (int64_t i = 0; i < k; ++i) panel[i * kPanel + column] = row[i];
}

bool is_four_bit(SourceKind kind) { return kind == SourceKind::kQ4_0 || kind == SourceKind::kQ4_1; }

// The packed column of row r.
int64_t column_of(const Linear& linear, int64_t r) {
  if (!linear.paired) return r;
  const int64_t half = linear.rows / 2, feature = r % half;
  return feature / 16 * kPanel + feature % 16 + (r < half ? 0 : 16);
}

// `row` is scratch for k floats rounded up to whole blocks, zeroed behind k.
void pack_column(const Linear& linear, uint8_t* arena, const uint8_t* source, SourceKind kind, int64_t n, float* row) {
  const LinearView& shape = linear.shape;
  uint8_t* const panel = arena + linear.weights_at + n / kPanel * shape.panel_bytes;
  const int64_t column = n % kPanel;
  const bool to_eight = shape.layout == Layout::kInt8;
  const bool exact = shape.layout != Layout::kFloat32 && (to_eight ? kind == SourceKind::kQ8_0 || kind == SourceKind::kQ4_0 : is_four_bit(kind));
  if (!exact) decode_row(source, kind, shape.k, row);
  if (shape.layout == Layout::kFloat32) return pack_float_column(row, shape.k, reinterpret_cast<float*>(panel), column);
  const int64_t num_blocks = shape.padded_k / kBlockK, num_groups = (num_blocks + 1) / 2;
  const auto stored = [&](int64_t b) { return source + b * block_bytes(kind); };
  for (int64_t b = 0; to_eight && b < num_blocks; ++b) {
    const QuantizedBlock block = !exact ? round_to_eight_bits(row + b * kBlockK) : kind == SourceKind::kQ8_0 ? read_eight_bit(stored(b)) : read_four_bit(stored(b), kind, true);
    put_int8_block(block, panel + b * kInt8BlockBytes, column);
  }
  if (to_eight) return;
  std::vector<float> minima;
  for (int64_t g = 0; g < num_groups; ++g) {
    QuantizedBlock blocks[2]{};
    for (int64_t b = 2 * g; b < std::min(2 * g + 2, num_blocks); ++b) blocks[b % 2] = exact ? read_four_bit(stored(b), kind, false) : round_to_four_bits(row + b * kBlockK);
    const QuantizedGroup group = in_group(blocks);
    put_int4_group(group, panel, g, num_groups, column);
    minima.insert(minima.end(), group.base, group.base + 2);
  }
  put_minima(minima, panel, column);
}

// Calls body(first, last) on several threads for parts of [0, count).
template <typename Body>
void in_parts(int64_t count, int num_threads, const Body& body) {
  const int64_t parts = std::clamp<int64_t>(num_threads, 1, std::max<int64_t>(1, count / 64));
  std::vector<std::thread> threads;
  for (int64_t t = 1; t < parts; ++t) threads.emplace_back(body, count * t / parts, count * (t + 1) / parts);
  body(0, count / parts);
  for (std::thread& thread : threads) thread.join();
}

int64_t bytes_per_panel(Layout layout, int64_t padded_k) {
  switch (layout) {
    case Layout::kFloat32: return padded_k * kPanel * 4;
    case Layout::kInt8: return padded_k / kBlockK * kInt8BlockBytes;
    default: {
      const int64_t num_groups = (padded_k / kBlockK + 1) / 2;
      return int4_groups_at(num_groups) + num_groups * kInt4GroupBytes;
    }
  }
}

}  // namespace

int64_t row_bytes(SourceKind kind, int64_t k) {
  if (kind == SourceKind::kFloat32) return 4 * k;
  if (kind == SourceKind::kFloat16 || kind == SourceKind::kBfloat16) return 2 * k;
  if (k % kBlockK != 0) throw std::invalid_argument("rows of " + std::to_string(k) + " weights are no multiple of the block of 32");
  return k / kBlockK * block_bytes(kind);
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
  if (kind == SourceKind::kBfloat16) {
    for (int64_t i = 0; i < k; ++i) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * i, 2);
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      std::memcpy(out + i, &wide, 4);
    }
    return;
  }
  for (int64_t b = 0; b < k / kBlockK; ++b, row += block_bytes(kind), out += kBlockK) {
    const float step = half_to_float(row);
    if (kind == SourceKind::kQ8_0) {
      for (int i = 0; i < kBlockK; ++i) out[i] = step * static_cast<float>(static_cast<int8_t>(row[2 + i]));
    } else if (kind == SourceKind::kQ4_0) {
      for (int i = 0; i < 16; ++i) out[i] = step * static_cast<float>((row[2 + i] & 15) - 8), out[i + 16] = step * static_cast<float>((row[2 + i] >> 4) - 8);
    } else {
      const float base = half_to_float(row + 2);
      for (int i = 0; i < 16; ++i) out[i] = step * static_cast<float>(row[4 + i] & 15) + base, out[i + 16] = step * static_cast<float>(row[4 + i] >> 4) + base;
    }
  }
}

void define_linear(Model* model, Linear* linear, int64_t rows, int64_t k, Layout layout, bool paired, bool has_bias, bool fine) {
  if (layout == Layout::kInt4 && k > kMostK) throw std::invalid_argument("four bits hold up to " + std::to_string(kMostK) + " columns, not " + std::to_string(k));
  if (paired && rows % 2 != 0) throw std::invalid_argument("pairs need an even number of rows, got " + std::to_string(rows));
  LinearView& shape = linear->shape;
  linear->rows = rows;
  linear->paired = paired;
  shape.layout = layout;
  shape.n = paired ? (rows / 2 + 15) / 16 * 32 : rows;
  shape.k = k;
  shape.padded_k = (k + kBlockK - 1) / kBlockK * kBlockK;
  shape.num_panels = (shape.n + kPanel - 1) / kPanel;
  shape.panel_bytes = bytes_per_panel(layout, shape.padded_k);
  shape.group_blocks = layout == Layout::kInt4 && !fine ? 2 : 1;
  linear->weights_at = model->reserve(linear->num_bytes());
  linear->bias_at = has_bias ? model->reserve(shape.num_panels * kPanel * static_cast<int64_t>(sizeof(float))) : kAbsent;
}

void pack_rows(const Linear& linear, uint8_t* arena, int64_t first_row, const WeightPart& part, int num_threads) {
  const int64_t k = linear.shape.k, bytes = row_bytes(part.kind, k);
  if (first_row < 0 || part.rows < 0 || first_row + part.rows > linear.rows) throw std::invalid_argument("rows outside of the linear's " + std::to_string(linear.rows));
  in_parts(part.rows, num_threads, [&](int64_t first, int64_t last) {
    std::vector<float> row(static_cast<size_t>(linear.shape.padded_k));
    for (int64_t r = first; r < last; ++r) {
      pack_column(linear, arena, part.data + (part.order != nullptr ? part.order[r] : r) * bytes, part.kind, column_of(linear, first_row + r), row.data());
    }
  });
}

void set_bias(const Linear& linear, uint8_t* arena, int64_t first_row, const float* values, int64_t count) {
  if (linear.bias_at == kAbsent) throw std::invalid_argument("the linear has no bias");
  if (first_row < 0 || first_row + count > linear.rows) throw std::invalid_argument("rows outside of the linear's " + std::to_string(linear.rows));
  float* const bias = reinterpret_cast<float*>(arena + linear.bias_at);
  for (int64_t r = 0; r < count; ++r) bias[column_of(linear, first_row + r)] = values[r];
}

uint64_t hash_rows(const WeightPart& part, int64_t k, const uint64_t* row_keys, const uint64_t* column_keys, int num_threads) {
  const int64_t bytes = row_bytes(part.kind, k);
  std::atomic<uint64_t> total{0};
  in_parts(part.rows, num_threads, [&](int64_t first, int64_t last) {
    std::vector<float> row(static_cast<size_t>(k));
    uint64_t sum = 0;
    for (int64_t r = first; r < last; ++r) {
      decode_row(part.data + (part.order != nullptr ? part.order[r] : r) * bytes, part.kind, k, row.data());
      uint64_t row_sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        uint32_t bits;
        std::memcpy(&bits, &row[static_cast<size_t>(i)], 4);
        row_sum += bits * column_keys[i];
      }
      sum += row_sum * row_keys[r];
    }
    total += sum;
  });
  return total;
}

void derive_screen(const Linear& head, const Linear& screen, uint8_t* arena, int64_t first_row, int64_t count, int num_threads) {
  if (head.shape.layout != Layout::kInt8 || screen.shape.layout != Layout::kInt4 || screen.rows != head.rows || screen.shape.k != head.shape.k) {
    throw std::invalid_argument("a screen is int4, beside an int8 LM head of the same size");
  }
  const int64_t k = (head.shape.padded_k + 2 * kBlockK - 1) / (2 * kBlockK) * (2 * kBlockK);
  std::vector<float> dithers(static_cast<size_t>(k));
  for (int64_t i = 0; i < k; ++i) dithers[static_cast<size_t>(i)] = screen_dither(static_cast<uint32_t>(i));
  in_parts(count, num_threads, [&](int64_t first, int64_t last) {
    std::vector<float> weights(static_cast<size_t>(k), 0.0f);
    for (int64_t r = first_row + first; r < first_row + last; ++r) {
      unpack_row(head, arena, r, weights.data());
      screen_column(weights, dithers, arena + screen.weights_at + r / kPanel * screen.shape.panel_bytes, r % kPanel);
    }
  });
}

void unpack_row(const Linear& linear, const uint8_t* arena, int64_t r, float* out) {
  const int64_t n = column_of(linear, r), column = n % kPanel;
  const uint8_t* const panel = arena + linear.weights_at + n / kPanel * linear.shape.panel_bytes;
  for (int64_t i = 0; i < linear.shape.k; ++i) {
    const int64_t b = i / kBlockK, j = i % kBlockK;
    if (linear.shape.layout == Layout::kFloat32) {
      out[i] = reinterpret_cast<const float*>(panel)[i * kPanel + column];
    } else if (linear.shape.layout == Layout::kInt8) {
      const uint8_t* const block = panel + b * kInt8BlockBytes;
      out[i] = half_to_float(block + kScalesAt + column * 2) * static_cast<float>(block[kInt8ValuesAt + (j / 4 * kPanel + column) * 4 + j % 4] - 128);
    } else {
      const int64_t num_groups = (linear.shape.padded_k / kBlockK + 1) / 2;
      const uint8_t* const group = panel + int4_groups_at(num_groups) + b / 2 * kInt4GroupBytes;
      const int pair = group[kInt4NibblesAt + (j / 4 * kPanel + column) * 4 + j % 4], steps = panel[int4_steps_at(num_groups) + b / 2 * kPanel + column];
      const float q = static_cast<float>(b % 2 == 0 ? (pair & 15) * (steps & 15) : (pair >> 4) * (steps >> 4));
      float unit;
      int16_t multiple;
      std::memcpy(&unit, panel + column * 4, sizeof(unit));
      std::memcpy(&multiple, panel + minimum_at(b, column), sizeof(multiple));
      out[i] = half_to_float(group + kScalesAt + column * 2) * q + unit * static_cast<float>(multiple);
    }
  }
}

}  // namespace fused
}  // namespace fastengine
