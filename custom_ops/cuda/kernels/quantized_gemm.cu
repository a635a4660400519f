// Products of few rows with 4- and 8-bit weights (group scales, zero points) on the tensor cores.
//
// Target: 80 % of copy bandwidth, counting the weights' bytes, for up to 8 rows and 16 million weights on. For
// more than some 64 rows, expanding the weights and an ordinary product are faster.
//
// A block has 32 output channels and up to 32 rows of x. Its eight warps have a part of the inner axis each and
// add up in a fixed order, so a result depends on its own row alone. The products sum exact integers
// (q - zero) times x; a group's scale multiplies its sum. Weights lie in memory as the lanes use them:
//
//   weight  [out_size / 16][in_size / unit][32 lanes][16 bytes]      unit: 64 inner values at 4 bits, 32 at 8
//   lane    channels g = lane / 4 and g + 8 of the 16, inner values 32 (s / 2) + 8 (lane % 4) + 4 (s % 2) + 0 .. 3
//           of the unit in step s = 0, 1, ..
//   4 bits  word s: nibbles 0 .. 3 are the first values of (g, 0-1), (g + 8, 0-1), (g, 2-3), (g + 8, 2-3), nibbles
//           4 .. 7 the second ones
//   8 bits  words 2 s and 2 s + 1: bytes (g, 0), (g + 8, 0), (g, 1), (g + 8, 1), then the same of values 2 and 3
//
// Eight of a lane's inner values are neighbours in x: one load.
#include "device/numeric.h"
#include "device/tensor_core.h"
#include "launchers.h"

namespace fastengine {
namespace cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kChannels = 32;  // of a block
constexpr int kChunk = 32;     // inner values after which a group may end

// The weights of channels g and g + 8 as operands: integers less their zero points.
template <typename T, int kBits>
struct Dequantizer;

// q or'ed into the mantissa of a power of two is that power plus q; what it is the kernel's zero is added to.
template <typename T>
constexpr float kMagic = 1024.0f;
template <>
constexpr float kMagic<BFloat16> = 128.0f;
template <typename T>
constexpr uint32_t kMagicBits = 0x64006400u;
template <>
constexpr uint32_t kMagicBits<BFloat16> = 0x43004300u;

template <typename T>
struct Dequantizer<T, 4> {
  uint32_t minus[2];
  FE_DEVICE void set_zeros(float low, float high) { minus[0] = pack2<T>(kMagic<T> + low, kMagic<T> + low), minus[1] = pack2<T>(kMagic<T> + high, kMagic<T> + high); }
  FE_DEVICE void operator()(const uint32_t words[4], int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = subtract2<T>((words[step] >> (4 * i) & 0x000f000fu) | kMagicBits<T>, minus[i % 2]);
  }
};

template <>
struct Dequantizer<Float16, 8> {
  uint32_t minus[2];
  FE_DEVICE void set_zeros(float low, float high) {
    minus[0] = pack2<Float16>(kMagic<Float16> + low, kMagic<Float16> + low), minus[1] = pack2<Float16>(kMagic<Float16> + high, kMagic<Float16> + high);
  }
  FE_DEVICE void operator()(const uint32_t words[4], int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = subtract2<Float16>((words[2 * step + i / 2] >> (8 * (i % 2)) & 0x00ff00ffu) | kMagicBits<Float16>, minus[i % 2]);
  }
};

// bfloat16 has too few bits for the trick: it goes by way of float32. The differences are exact again.
template <>
struct Dequantizer<BFloat16, 8> {
  static constexpr float kFloatMagic = 8388608.0f;  // 2^23
  float minus[2];
  FE_DEVICE void set_zeros(float low, float high) { minus[0] = kFloatMagic + low, minus[1] = kFloatMagic + high; }
  FE_DEVICE void operator()(const uint32_t words[4], int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = words[2 * step + i / 2] >> (8 * (i % 2));
      const float first = __uint_as_float(0x4b000000u | (pair & 0xffu)), second = __uint_as_float(0x4b000000u | (pair >> 16 & 0xffu));
      a[i] = pack2<BFloat16>(first - minus[i % 2], second - minus[i % 2]);
    }
  }
};

template <typename T, int kBits, int kRowTiles>
struct GemmWarp {
  static constexpr int kUnit = kBits == 4 ? 64 : 32;
  static constexpr int kSteps = kUnit / 16;
  static constexpr int kAhead = kRowTiles > 2 ? 1 : 2;  // units under way per warp: as registers allow

  struct Operands {
    uint4 weights[2];
    uint4 x[kRowTiles][kSteps / 2];
  };

  const QuantizedGemmArgs& a;
  const int channel;  // the block's first
  const int first_row;
  Dequantizer<T, kBits> dequantize[2];
  float scale[2][2];  // of channels g and g + 8 of both tiles
  float part[2][kRowTiles][4], total[2][kRowTiles][4];

  FE_DEVICE void load(int unit, Operands* to) const {
    const int64_t units = a.in_size / kUnit;
#pragma unroll
    for (int m = 0; m < 2; ++m) to->weights[m] = static_cast<const uint4*>(a.weight)[((channel / 16 + m) * units + unit) * kWarp + lane_id()];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      // Rows past the end repeat the last one; their results are dropped.
      const int64_t row = smaller<int64_t>(a.num_rows - 1, first_row + 8 * n + lane_id() / 4);
      const uint4* const from = reinterpret_cast<const uint4*>(static_cast<const T*>(a.x) + row * a.in_size + unit * static_cast<int64_t>(kUnit) + lane_id() % 4 * 8);
#pragma unroll
      for (int i = 0; i < kSteps / 2; ++i) to->x[n][i] = from[i * kChunk / 8];
    }
  }

  FE_DEVICE void begin_group(int64_t group) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int64_t at = group * a.out_size + channel + 16 * m + lane_id() / 4;
      scale[m][0] = a.scales[at], scale[m][1] = a.scales[at + 8];
      const float middle = kBits == 4 ? 8.0f : 128.0f;
      dequantize[m].set_zeros(a.zeros != nullptr ? a.zeros[at] : middle, a.zeros != nullptr ? a.zeros[at + 8] : middle);
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) part[m][n][0] = part[m][n][1] = part[m][n][2] = part[m][n][3] = 0.0f;
    }
  }

  FE_DEVICE void end_group() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[m][n][i] += scale[m][i / 2] * part[m][n][i];
      }
    }
  }

  FE_DEVICE void multiply(const Operands& operands, int step) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint4 raw = operands.weights[m];
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      uint32_t w[4];
      dequantize[m](words, step, w);
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const uint4 x = operands.x[n][step / 2];
        mma_16x8x16<T>(part[m][n], w, step % 2 == 0 ? x.x : x.z, step % 2 == 0 ? x.y : x.w);
      }
    }
  }

  // The products with units [begin, end).
  FE_DEVICE void run(int begin, int end) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) total[m][n][0] = total[m][n][1] = total[m][n][2] = total[m][n][3] = 0.0f;
    }
    if (begin >= end) return;
    Operands ahead[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load(smaller(begin + j, end - 1), &ahead[j]);
    const int chunks_per_group = static_cast<int>(a.group_size / kChunk), first_chunk = begin * (kUnit / kChunk);
    int group = first_chunk / chunks_per_group, left = (group + 1) * chunks_per_group - first_chunk;
    begin_group(group);
    for (int first = begin; first < end; first += kAhead) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int unit = first + j;
        if (unit >= end) break;
        const Operands operands = ahead[j];
        load(smaller(unit + kAhead, end - 1), &ahead[j]);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (left == 0) {
            end_group();
            begin_group(++group);
            left = chunks_per_group;
          }
          multiply(operands, step);
          if (step % 2 == 1) --left;
        }
      }
    }
    end_group();
  }
};

template <typename T, int kBits, int kRowTiles>
__global__ void __launch_bounds__(kThreads) quantized_gemm_kernel(const QuantizedGemmArgs a) {
  using Warp = GemmWarp<T, kBits, kRowTiles>;
  constexpr int kRows = 8 * kRowTiles;
  float* const sums = dynamic_shared<float>();  // [warp][row][channel]
  const int channel = static_cast<int>(blockIdx.x) * kChannels, first_row = static_cast<int>(blockIdx.y) * kRows;
  Warp warp{a, channel, first_row};
  const int units = static_cast<int>(a.in_size / Warp::kUnit), per_warp = static_cast<int>(ceil_div(units, kWarps));
  const int begin = smaller(units, warp_id() * per_warp);
  warp.run(begin, smaller(units, begin + per_warp));
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * n + 2 * (lane_id() % 4) + i % 2, at = 16 * m + lane_id() / 4 + 8 * (i / 2);
        sums[(warp_id() * kRows + row) * kChannels + at] = warp.total[m][n][i];
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChannels; i += kThreads) {
    const int64_t row = first_row + i / kChannels, at = channel + i % kChannels;
    if (row >= a.num_rows) break;
    float total = 0.0f;
    for (int w = 0; w < kWarps; ++w) total += sums[w * kRows * kChannels + i];
    if (a.bias != nullptr) total += to_float(static_cast<const T*>(a.bias)[at]);
    static_cast<T*>(a.out)[row * a.out_size + at] = from_float<T>(total);
  }
}

template <typename T, int kBits, int kRowTiles>
int launch_tiles(const QuantizedGemmArgs& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.out_size / kChannels), static_cast<unsigned>(ceil_div(a.num_rows, 8 * kRowTiles)));
  constexpr size_t kShared = sizeof(float) * kWarps * 8 * kRowTiles * kChannels;
  return launch(quantized_gemm_kernel<T, kBits, kRowTiles>, grid, dim3(kThreads), kShared, stream, a);
}

template <typename T, int kBits>
int launch_bits(const QuantizedGemmArgs& a, cudaStream_t stream) {
  if (a.num_rows <= 8) return launch_tiles<T, kBits, 1>(a, stream);
  if (a.num_rows <= 16) return launch_tiles<T, kBits, 2>(a, stream);
  return launch_tiles<T, kBits, 4>(a, stream);
}

bool supported(const QuantizedGemmArgs& a) {
  const bool types = (a.dtype == kBFloat16 || a.dtype == kFloat16) && (a.bits == 4 || a.bits == 8);
  const bool sizes = a.in_size > 0 && a.in_size % 64 == 0 && a.in_size < int64_t{1} << 30 && a.out_size > 0 && a.out_size % kChannels == 0;
  return types && sizes && a.group_size > 0 && a.group_size % kChunk == 0 && a.in_size % a.group_size == 0 && a.num_rows <= 32 * 65535;
}

}  // namespace
}  // namespace cuda
}  // namespace fastengine

FE_OPERATOR(quantized_gemm, QuantizedGemmArgs) {
  using namespace fastengine::cuda;
  if (!supported(*args)) return kUnsupported;
  if (args->num_rows == 0) return 0;
  const auto s = static_cast<cudaStream_t>(stream);
  if (args->dtype == kBFloat16) return args->bits == 4 ? launch_bits<BFloat16, 4>(*args, s) : launch_bits<BFloat16, 8>(*args, s);
  return args->bits == 4 ? launch_bits<Float16, 4>(*args, s) : launch_bits<Float16, 8>(*args, s);
}
