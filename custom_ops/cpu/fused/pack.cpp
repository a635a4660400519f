#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
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

// The nearest half that is not below `value` >= 0.
float half_above(float value) {
  const uint16_t bits = float_to_half(value), next = static_cast<uint16_t>(bits + 1);
  const float nearest = half_to_float(reinterpret_cast<const uint8_t*>(&bits));
  return nearest < value ? half_to_float(reinterpret_cast<const uint8_t*>(&next)) : nearest;
}

// Of weights at and above `base`: no value is cut off; see derive_screen(). What a half can't hold makes the scale a NaN,
// and with it the result.
QuantizedBlock round_dithered(const float* x, float base, const float* dithers) {
  // Of nearly equal weights too the step is above what float operations round.
  constexpr float kLeastStep = 1.0f / 1024.0f;
  float high = x[0], most = 0.0f, finite = 0.0f;
  for (int i = 0; i < kBlockK; ++i) high = std::max(high, x[i]), most = std::max(most, std::fabs(x[i])), finite += x[i] * 0.0f;
  const float step = half_above(std::max((high - base) / 15.0f, most * kLeastStep));
  QuantizedBlock block{step + step * 0.0f + finite, base, {}};
  const float inverse = block.step > 0 ? 1.0f / block.step : 0.0f;
  for (int i = 0; i < kBlockK; ++i) block.q[i] = static_cast<int8_t>(std::fmin(std::fmax(std::nearbyint((x[i] - base) * inverse + dithers[i]), 0.0f), 15.0f));
  return block;
}

void put_half(uint8_t* target, int64_t column, float value) {
  const uint16_t bits = float_to_half(value);
  std::memcpy(target + column * 2, &bits, 2);
}

void put_int8_block(const QuantizedBlock& block, uint8_t* target, int64_t column) {
  put_half(target + kScalesAt, column, block.step);
  for (int64_t i = 0; i < kBlockK; ++i) target[kInt8ValuesAt + (i / 4 * kPanel + column) * 4 + i % 4] = static_cast<uint8_t>(block.q[i] + 128);
}

void put_int4_block(const QuantizedBlock& block, uint8_t* target, int64_t column) {
  put_half(target + kScalesAt, column, block.step);
  for (int64_t i = 0; i < kBlockK; i += 8) {
    uint8_t* const pairs = target + kInt4NibblesAt + (i / 8 * kPanel + column) * 4;
    for (int j = 0; j < 4; ++j) pairs[j] = static_cast<uint8_t>(block.q[i + j] | block.q[i + 4 + j] << 4);
  }
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

// The column's part of a screen from its weights: minima that are exact multiples, not above any weight.
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
    const QuantizedBlock block = round_dithered(&weights[b * kBlockK], unit * multiple, &dithers[b * kBlockK]);
    put_int4_block(block, panel + int4_blocks_at(static_cast<int64_t>(num_blocks)) + static_cast<int64_t>(b) * kInt4BlockBytes, column);
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
  const int64_t num_blocks = shape.padded_k / kBlockK;
  std::vector<float> minima(to_eight ? 0 : static_cast<size_t>((num_blocks + 1) / 2 * 2));
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint8_t* const stored = source + b * block_bytes(kind);
    const float* const values = row + b * kBlockK;
    if (to_eight) {
      const QuantizedBlock block = !exact ? round_to_eight_bits(values) : kind == SourceKind::kQ8_0 ? read_eight_bit(stored) : read_four_bit(stored, kind, true);
      put_int8_block(block, panel + b * kInt8BlockBytes, column);
    } else {
      const QuantizedBlock block = exact ? read_four_bit(stored, kind, false) : round_to_four_bits(values);
      put_int4_block(block, panel + int4_blocks_at(num_blocks) + b * kInt4BlockBytes, column);
      minima[static_cast<size_t>(b)] = block.base;
    }
  }
  if (!to_eight) put_minima(minima, panel, column);
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
    default: return int4_blocks_at(padded_k / kBlockK) + padded_k / kBlockK * kInt4BlockBytes;
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

void define_linear(Model* model, Linear* linear, int64_t rows, int64_t k, Layout layout, bool paired, bool has_bias) {
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
  linear->weights_at = model->reserve(shape.num_panels * shape.panel_bytes);
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
  const int64_t k = head.shape.padded_k;
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
      const uint8_t* const block = panel + int4_blocks_at(linear.shape.padded_k / kBlockK) + b * kInt4BlockBytes;
      const uint8_t pair = block[kInt4NibblesAt + (j / 8 * kPanel + column) * 4 + j % 4];
      const float q = static_cast<float>(j % 8 < 4 ? pair & 15 : pair >> 4);
      float unit;
      int16_t multiple;
      std::memcpy(&unit, panel + column * 4, sizeof(unit));
      std::memcpy(&multiple, panel + minimum_at(b, column), sizeof(multiple));
      out[i] = half_to_float(block + kScalesAt + column * 2) * q + unit * static_cast<float>(multiple);
    }
  }
}

}  // namespace fused
}  // namespace fastengine
