// Bit-level formulas of the narrow floating formats. One implementation serves single elements, on
// the host and in CUDA kernels, and GCC's vectors, so all give the same bits.
//
// F is float or a vector of floats; U is uint32_t or a vector with as many elements. Elements of a
// narrow format are passed as codes: their bits in the low end of a U. The arithmetic needs
// denormals kept and no contraction. Everything is inlined: see HOST_DEVICE_INLINE.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "base/host_device.h"

namespace rota {

// ---- formats

// The code of a magnitude (without the sign) grows with its value; NaN comes last.
struct FloatFormat {
  int num_bits;
  int mantissa_bits;
  uint32_t bias;  // of the exponent
  uint32_t max_finite;
  uint32_t too_large;  // the code for overflow: Inf, or NaN in a format without Inf
  uint32_t nan;
};

// The formats of float16, bfloat16 and the two float8. In scaled blocks no number needs the largest
// finite code of float8_e4m3fn, so that code represents Inf (base/wire_format.h).
HOST_DEVICE_INLINE constexpr FloatFormat float_format(DType dtype, bool is_scaled = false) {
  if (dtype == DType::kFloat16) return {16, 10, 15, 0x7bff, 0x7c00, 0x7e00};
  if (dtype == DType::kBFloat16) return {16, 7, 127, 0x7f7f, 0x7f80, 0x7fc0};
  if (dtype == DType::kFloat8E5M2) return {8, 2, 15, 0x7b, 0x7c, 0x7f};
  if (dtype == DType::kFloat8E4M3 && is_scaled) return {8, 3, 7, 0x7d, 0x7e, 0x7f};
  if (dtype == DType::kFloat8E4M3) return {8, 3, 7, 0x7e, 0x7f, 0x7f};
  __builtin_unreachable();  // formats are constants, so another dtype does not compile
}

// ---- float32

inline constexpr int kMantissaBits = 23;
inline constexpr uint32_t kExponentBias = 127;
inline constexpr uint32_t kMagnitudeMask = 0x7fffffff;
inline constexpr uint32_t kInfinityBits = 0x7f800000;

template <typename To, typename From>
HOST_DEVICE_INLINE constexpr To bit_as(From value) {
  return __builtin_bit_cast(To, value);
}

// Truncates a value in [0, 2^31).
template <typename U, typename F>
HOST_DEVICE_INLINE constexpr U to_integer(F value) {
  if constexpr (std::is_arithmetic_v<F>) {
    return static_cast<U>(static_cast<int32_t>(value));
  } else {
    // Through signed lanes (the type of a comparison), the only conversion with an instruction on
    // every machine.
    return (U) __builtin_convertvector(value, decltype(value < value));
  }
}

// float64 to float32 "rounded to odd": inexact results get an odd last bit, so that a second
// rounding to 16 or 8 bits sees which side of a tie the float64 lay on (Boldo & Melquiond 2008).
HOST_DEVICE_INLINE constexpr float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (static_cast<double>(nearest) == value || value != value) return nearest;
  uint32_t bits = bit_as<uint32_t>(nearest);
  if (bits & 1) return nearest;
  const bool is_above = nearest > value;  // step back towards value, away from the even neighbour
  const bool is_negative = bits >> 31;
  bits += is_above == is_negative ? 1 : -1;
  return bit_as<float>(bits);
}

// ---- float32 to a narrow format

// Completes the code of a rounded magnitude: overflow, NaN and the sign, from the float's bits.
template <FloatFormat format, typename U>
HOST_DEVICE_INLINE constexpr U finish_narrow(U bits, U rounded) {
  constexpr int kSignShift = 32 - format.num_bits;
  constexpr uint32_t kSign = 0x80000000u >> kSignShift;
  U result = rounded > format.max_finite ? U{} + format.too_large : rounded;
  if constexpr (format.nan != format.too_large) {  // otherwise the line above handles NaN as well
    result = (bits & kMagnitudeMask) > kInfinityBits ? U{} + format.nan : result;
  }
  return result | ((bits >> kSignShift) & kSign);
}

// To nearest, ties to even.
template <FloatFormat format, typename U = uint32_t, typename F>
HOST_DEVICE_INLINE constexpr U narrow_to_nearest(F value) {
  constexpr int kDropped = kMantissaBits - format.mantissa_bits;
  const U bits = bit_as<U>(value);
  // Rounds by carry: adds just under half a unit, plus one if the truncated result is odd.
  constexpr uint32_t kUnderHalf = (1u << (kDropped - 1)) - 1;
  if constexpr (format.bias == kExponentBias) {
    // The code is the upper bits of a float32. Rounding could turn a NaN into Inf, so a NaN is made
    // quiet instead.
    constexpr uint32_t kQuiet = 1u << (format.mantissa_bits - 1);
    const U rounded = (bits + kUnderHalf + ((bits >> kDropped) & 1)) >> kDropped;
    const U quiet = (bits >> kDropped) | kQuiet;
    return (bits & kMagnitudeMask) > kInfinityBits ? quiet : rounded;
  } else {
    constexpr uint32_t kRebias = kExponentBias - format.bias;
    const U magnitude = bits & kMagnitudeMask;
    const U carried = magnitude + kUnderHalf + ((magnitude >> kDropped) & 1);
    const U normal = (carried >> kDropped) - (kRebias << format.mantissa_bits);
    // Denormals are rounded by an addition: the last place of the sum is that of this format.
    constexpr uint32_t kShifter = (kRebias + kDropped + 1) << kMantissaBits;
    const F shifted = bit_as<F>(magnitude) + bit_as<float>(kShifter);
    const U denormal = bit_as<U>(shifted) - kShifter;
    const U rounded = magnitude < ((kRebias + 1) << kMantissaBits) ? denormal : normal;
    return finish_narrow<format>(bits, rounded);
  }
}

// Stochastic rounding to one of the two neighbours, the nearer one being likelier: adds a random
// fraction of the last place and truncates. Uses the upper bits of `random`.
template <FloatFormat format, typename U, typename F>
HOST_DEVICE_INLINE constexpr U narrow_at_random(F value, U random) {
  constexpr int kDropped = kMantissaBits - format.mantissa_bits;
  constexpr uint32_t kRebias = kExponentBias - format.bias;
  const U bits = bit_as<U>(value);
  const U magnitude = bits & kMagnitudeMask;
  const U fraction = random >> (32 - kDropped);
  U rounded = ((magnitude + fraction) >> kDropped) - (kRebias << format.mantissa_bits);
  if constexpr (kRebias > 0) {
    // Denormals, in fixed point: units of the last place, times 2^kDropped.
    constexpr uint32_t kUnits = (kExponentBias + format.bias + kMantissaBits - 1) << kMantissaBits;
    const auto is_denormal = magnitude < ((kRebias + 1) << kMantissaBits);
    const F small = bit_as<F>(is_denormal ? magnitude : U{});
    const U units = to_integer<U>(small * bit_as<float>(kUnits));
    rounded = is_denormal ? (units + fraction) >> kDropped : rounded;
  }
  return finish_narrow<format>(bits, rounded);
}

// ---- a narrow format to float32, which is exact

// A float8 equals float16_of() its code times float16_factor(). H is uint32_t or a vector of
// uint16_t or uint32_t.
HOST_DEVICE_INLINE constexpr float float16_factor(FloatFormat float8) {
  return static_cast<float>(1u << (15 - float8.bias));
}
template <FloatFormat format, typename H>
HOST_DEVICE_INLINE constexpr H float16_of(H code) {
  static_assert(format.num_bits == 8);
  if constexpr (format.bias == 15) {
    return code << 8;  // the upper half of a float16
  } else {
    const H magnitude = code & 0x7f;
    const H sign = (code & 0x80) << 8;
    const H half = sign | (magnitude << 7);
    if constexpr (format.too_large == format.nan) {
      return magnitude == 0x7f ? H{} + 0x7e00 : half;
    } else {
      const H special = sign | (0x7c00 + (magnitude - 0x7e));  // Inf, then NaN
      return magnitude > format.max_finite ? special : half;
    }
  }
}

template <FloatFormat format, typename F = float, typename U>
HOST_DEVICE_INLINE constexpr F widen(U code) {
  if constexpr (format.num_bits == 8) {
    constexpr float kFactor = float16_factor(format);
    return widen<float_format(DType::kFloat16), F>(float16_of<format>(code)) * kFactor;
  } else if constexpr (format.bias == kExponentBias) {
    return bit_as<F>(code << 16);  // the upper half of a float32
  } else {
    const U magnitude = code & 0x7fff;
    // Read with float32's exponent bias, the number is 2^112 times too small, denormals included.
    const U finite = bit_as<U>(bit_as<F>(magnitude << 13) * 0x1p112f);
    const U result = magnitude < 0x7c00 ? finite : (magnitude << 13) | kInfinityBits;
    return bit_as<F>(result | ((code & 0x8000) << 16));
  }
}

}  // namespace rota
