// Element types and their conversions, eight elements at a time where memory is touched.
#pragma once

#include "../args.h"
#include "platform.h"

namespace fastengine {
namespace cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Fp8E4M3 {
  uint8_t bits;
};

constexpr float kFp8Largest = 448.0f;

FE_HOST_DEVICE int64_t element_bytes(int32_t dtype) { return dtype == kFloat32 ? 4 : dtype == kBFloat16 || dtype == kFloat16 ? 2 : 1; }

// ---- two 16-bit floats in a register -------------------------------------------------------------

#if FE_ON_GPU

template <typename T>
FE_DEVICE float2 unpack2(uint32_t pair);
template <>
FE_DEVICE float2 unpack2<BFloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
FE_DEVICE float2 unpack2<Float16>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

template <typename T>
FE_DEVICE uint32_t pack2(float low, float high);
template <>
FE_DEVICE uint32_t pack2<BFloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
FE_DEVICE uint32_t pack2<Float16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The difference of two pairs, each rounded to nearest.
template <typename T>
FE_DEVICE uint32_t subtract2(uint32_t pair, uint32_t other);
template <>
FE_DEVICE uint32_t subtract2<BFloat16>(uint32_t pair, uint32_t other) {
  const __nv_bfloat162 result = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&pair), *reinterpret_cast<const __nv_bfloat162*>(&other));
  return *reinterpret_cast<const uint32_t*>(&result);
}
template <>
FE_DEVICE uint32_t subtract2<Float16>(uint32_t pair, uint32_t other) {
  const __half2 result = __hsub2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&other));
  return *reinterpret_cast<const uint32_t*>(&result);
}

// Two fp8 values as two halves, exactly.
FE_DEVICE uint32_t fp8x2_to_halves(uint16_t pair) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
  return *reinterpret_cast<const uint32_t*>(&halves);
}
FE_DEVICE uint16_t pack2_fp8(float low, float high) { return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3); }

#else

inline float bf16_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) return (sign != 0 ? -1.0f : 1.0f) * std::ldexp(static_cast<float>(mantissa), -24);
  return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
// The nearest multiple of 2^exponent, ties to even.
inline float round_to_power(float value, int exponent) { return std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent); }
inline uint16_t float_to_half(float value) {
  const uint16_t sign = static_cast<uint16_t>(__float_as_uint(value) >> 16 & 0x8000);
  const float magnitude = std::fabs(value);
  if (value != value) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 6.103515625e-05f) return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(round_to_power(magnitude, -24), 24)));
  const float rounded = round_to_power(magnitude, std::ilogb(magnitude) - 10);
  const uint32_t bits = __float_as_uint(rounded);
  return static_cast<uint16_t>(sign | ((bits >> 23) - 112) << 10 | (bits >> 13 & 1023));
}
inline float fp8_to_float(uint8_t bits) {
  const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9) : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10));
}
inline uint8_t float_to_fp8(float value) {
  const uint8_t sign = (__float_as_uint(value) >> 31) != 0 ? 0x80 : 0;
  if (value != value) return static_cast<uint8_t>(sign | 0x7f);
  const float magnitude = std::fmin(std::fabs(value), kFp8Largest);
  if (magnitude < 0.015625f) return static_cast<uint8_t>(sign | static_cast<uint8_t>(std::ldexp(round_to_power(magnitude, -9), 9)));
  const float rounded = round_to_power(magnitude, std::ilogb(magnitude) - 3);
  const int exponent = std::ilogb(rounded);
  return static_cast<uint8_t>(sign | (exponent + 7) << 3 | (static_cast<int>(std::ldexp(rounded, 3 - exponent)) & 7));
}

template <typename T>
float2 unpack2(uint32_t pair);
template <>
inline float2 unpack2<BFloat16>(uint32_t pair) {
  return {bf16_to_float(static_cast<uint16_t>(pair)), bf16_to_float(static_cast<uint16_t>(pair >> 16))};
}
template <>
inline float2 unpack2<Float16>(uint32_t pair) {
  return {half_to_float(static_cast<uint16_t>(pair)), half_to_float(static_cast<uint16_t>(pair >> 16))};
}
template <typename T>
uint32_t pack2(float low, float high);
template <>
inline uint32_t pack2<BFloat16>(float low, float high) {
  return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
}
template <>
inline uint32_t pack2<Float16>(float low, float high) {
  return float_to_half(low) | static_cast<uint32_t>(float_to_half(high)) << 16;
}
template <typename T>
uint32_t subtract2(uint32_t pair, uint32_t other) {
  const float2 a = unpack2<T>(pair), b = unpack2<T>(other);
  return pack2<T>(a.x - b.x, a.y - b.y);
}
inline uint32_t fp8x2_to_halves(uint16_t pair) {
  return float_to_half(fp8_to_float(static_cast<uint8_t>(pair))) | static_cast<uint32_t>(float_to_half(fp8_to_float(static_cast<uint8_t>(pair >> 8)))) << 16;
}
inline uint16_t pack2_fp8(float low, float high) { return static_cast<uint16_t>(float_to_fp8(low) | float_to_fp8(high) << 8); }

#endif

FE_DEVICE int8_t float_to_int8(float value) {
  const float rounded = rintf(fminf(fmaxf(value, -127.0f), 127.0f));
  return static_cast<int8_t>(static_cast<int>(rounded));
}

// ---- eight elements ------------------------------------------------------------------------------

// Eight consecutive elements as they lie in memory; `Raw` is loaded in one or two instructions.
template <typename T>
struct Eight;

template <typename T>
struct EightOf16Bit {
  using Raw = uint4;
  static FE_DEVICE void unpack(Raw raw, float out[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack2<T>(words[i]);
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
  static FE_DEVICE Raw pack(const float in[8]) {
    return make_uint4(pack2<T>(in[0], in[1]), pack2<T>(in[2], in[3]), pack2<T>(in[4], in[5]), pack2<T>(in[6], in[7]));
  }
};
template <>
struct Eight<BFloat16> : EightOf16Bit<BFloat16> {};
template <>
struct Eight<Float16> : EightOf16Bit<Float16> {};

template <>
struct Eight<float> {
  struct alignas(16) Raw {
    float4 low, high;
  };
  static FE_DEVICE void unpack(const Raw& raw, float out[8]) {
    out[0] = raw.low.x, out[1] = raw.low.y, out[2] = raw.low.z, out[3] = raw.low.w;
    out[4] = raw.high.x, out[5] = raw.high.y, out[6] = raw.high.z, out[7] = raw.high.w;
  }
  static FE_DEVICE Raw pack(const float in[8]) { return {make_float4(in[0], in[1], in[2], in[3]), make_float4(in[4], in[5], in[6], in[7])}; }
};

template <>
struct Eight<int8_t> {
  using Raw = uint2;
  static FE_DEVICE void unpack(Raw raw, float out[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = static_cast<float>(static_cast<int8_t>((i < 4 ? raw.x : raw.y) >> (8 * (i % 4))));
  }
  static FE_DEVICE Raw pack(const float in[8]) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) words[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(float_to_int8(in[i]))) << (8 * (i % 4));
    return make_uint2(words[0], words[1]);
  }
};

template <>
struct Eight<Fp8E4M3> {
  using Raw = uint2;
  static FE_DEVICE void unpack(Raw raw, float out[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint16_t pair = static_cast<uint16_t>((i < 2 ? raw.x : raw.y) >> (16 * (i % 2)));
      const float2 values = unpack2<Float16>(fp8x2_to_halves(pair));
      out[2 * i] = values.x;
      out[2 * i + 1] = values.y;
    }
  }
  static FE_DEVICE Raw pack(const float in[8]) {
    const uint32_t low = pack2_fp8(in[0], in[1]) | static_cast<uint32_t>(pack2_fp8(in[2], in[3])) << 16;
    const uint32_t high = pack2_fp8(in[4], in[5]) | static_cast<uint32_t>(pack2_fp8(in[6], in[7])) << 16;
    return make_uint2(low, high);
  }
};

template <typename T>
FE_DEVICE void load8(const T* from, float out[8]) {
  Eight<T>::unpack(*reinterpret_cast<const typename Eight<T>::Raw*>(from), out);
}
template <typename T>
FE_DEVICE void store8(T* to, const float in[8]) {
  *reinterpret_cast<typename Eight<T>::Raw*>(to) = Eight<T>::pack(in);
}

template <typename T>
FE_DEVICE float to_float(T value);
template <>
FE_DEVICE float to_float<float>(float value) {
  return value;
}
template <>
FE_DEVICE float to_float<BFloat16>(BFloat16 value) {
  return unpack2<BFloat16>(value.bits).x;
}
template <>
FE_DEVICE float to_float<Float16>(Float16 value) {
  return unpack2<Float16>(value.bits).x;
}

template <typename T>
FE_DEVICE T from_float(float value);
template <>
FE_DEVICE float from_float<float>(float value) {
  return value;
}
template <>
FE_DEVICE BFloat16 from_float<BFloat16>(float value) {
  return {static_cast<uint16_t>(pack2<BFloat16>(value, 0.0f))};
}
template <>
FE_DEVICE Float16 from_float<Float16>(float value) {
  return {static_cast<uint16_t>(pack2<Float16>(value, 0.0f))};
}

}  // namespace cuda
}  // namespace fastengine
