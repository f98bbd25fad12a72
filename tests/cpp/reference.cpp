#include "reference.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace rota::test {
namespace {

struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity = true;  // if not, NaN has all bits set and every other code is finite

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int min_exponent() const { return 1 - bias(); }  // of the smallest normal number
  uint64_t exponent_mask() const { return ((uint64_t{1} << exponent_bits) - 1) << mantissa_bits; }
  // The code for overflow; finite magnitudes lie below it.
  uint64_t limit() const { return has_infinity ? exponent_mask() : sign() - 1; }
  bool is_nan(uint64_t magnitude) const {
    return has_infinity ? magnitude > limit() : magnitude == limit();
  }
  uint64_t sign() const { return uint64_t{1} << (exponent_bits + mantissa_bits); }
};

FloatFormat format_of(DType dtype) {
  if (dtype == DType::kFloat64) return {11, 52};
  if (dtype == DType::kFloat16) return {5, 10};
  if (dtype == DType::kBFloat16) return {8, 7};
  if (dtype == DType::kFloat8E4M3) return {4, 3, /*has_infinity=*/false};
  if (dtype == DType::kFloat8E5M2) return {5, 2};
  return {8, 23};
}

// Integers wrap (-fwrapv).
template <typename T>
T combine_numbers(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      return a + b;
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kMin:
      return a != a || a < b ? a : b;
    case ReduceOp::kMax:
      return a != a || a > b ? a : b;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    return op == ReduceOp::kBand ? a & b : op == ReduceOp::kBor ? a | b : a ^ b;
  }
  return std::numeric_limits<T>::quiet_NaN();
}

// Acc: the accumulate dtype.
template <typename Acc>
uint64_t reduce_floats(DType dtype, ReduceOp op, std::span<const uint64_t> srcs, int divisor) {
  auto acc = static_cast<Acc>(to_double(dtype, srcs[0]));
  for (const uint64_t bits : srcs.subspan(1)) {
    acc = combine_numbers(op, acc, static_cast<Acc>(to_double(dtype, bits)));
  }
  if (op == ReduceOp::kAvg) acc /= static_cast<Acc>(divisor);
  return round_to(dtype, static_cast<double>(acc));
}

// The integer of dtype that the low bits of a word represent.
int64_t to_integer(DType dtype, uint64_t bits) {
  if (dtype == DType::kBool || dtype == DType::kUInt8) return static_cast<int64_t>(bits & 0xff);
  const int unused = 64 - 8 * static_cast<int>(info(dtype).num_bytes);
  return static_cast<int64_t>(bits << unused) >> unused;
}

uint64_t reduce_integers(DType dtype, ReduceOp op, std::span<const uint64_t> srcs, int divisor) {
  const auto load = [&](uint64_t bits) {
    const int64_t value = to_integer(dtype, bits);
    return dtype == DType::kBool ? int64_t{value != 0} : value;
  };
  int64_t acc = load(srcs[0]);
  for (const uint64_t bits : srcs.subspan(1)) {
    acc = to_integer(dtype, static_cast<uint64_t>(combine_numbers(op, acc, load(bits))));
  }
  return bits_of_integer(dtype, op == ReduceOp::kAvg ? acc / divisor : acc);
}

}  // namespace

double to_double(DType dtype, uint64_t bits) {
  const FloatFormat format = format_of(dtype);
  const double sign = (bits & format.sign()) != 0 ? -1 : 1;
  const uint64_t magnitude = bits & (format.sign() - 1);
  if (format.is_nan(magnitude)) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude == format.limit()) return sign * std::numeric_limits<double>::infinity();
  const auto exponent = static_cast<int>(magnitude >> format.mantissa_bits);
  uint64_t mantissa = magnitude & ((uint64_t{1} << format.mantissa_bits) - 1);
  if (exponent > 0) mantissa |= uint64_t{1} << format.mantissa_bits;
  const int quantum = format.min_exponent() - format.mantissa_bits;
  return sign *
         std::ldexp(static_cast<double>(mantissa), quantum + (exponent > 0 ? exponent - 1 : 0));
}

uint64_t round_to(DType dtype, double value) {
  const FloatFormat format = format_of(dtype);
  if (dtype == DType::kFloat64) return std::bit_cast<uint64_t>(value);
  if (std::isnan(value)) return format.limit() + (format.has_infinity ? 1 : 0);
  const uint64_t sign = std::signbit(value) ? format.sign() : 0;
  if (std::isinf(value)) return sign | format.limit();
  if (value == 0) return sign;
  int exponent = 0;
  std::frexp(value, &exponent);  // |value| in [0.5, 1) * 2^exponent
  exponent = std::max(exponent - 1, format.min_exponent());
  // The value in units of the last place: nearbyint is the only rounding.
  const double units =
      std::nearbyint(std::ldexp(std::fabs(value), format.mantissa_bits - exponent));
  // The leading bit of a normal number counts as one step of the exponent; so does a carry.
  const auto steps = static_cast<uint64_t>(exponent - format.min_exponent());
  const uint64_t magnitude = (steps << format.mantissa_bits) + static_cast<uint64_t>(units);
  return sign | std::min(magnitude, format.limit());
}

bool is_nan(DType dtype, uint64_t bits) {
  if (!info(dtype).is_floating) return false;
  const FloatFormat format = format_of(dtype);
  return format.is_nan(bits & (format.sign() - 1));
}

bool is_same(DType dtype, uint64_t a, uint64_t b) {
  return a == b || (is_nan(dtype, a) && is_nan(dtype, b));
}

uint64_t reduce_scalars(DType dtype, ReduceOp op, std::span<const uint64_t> srcs, int divisor) {
  if (!info(dtype).is_floating) return reduce_integers(dtype, op, srcs, divisor);
  if (dtype == DType::kFloat64) return reduce_floats<double>(dtype, op, srcs, divisor);
  return reduce_floats<float>(dtype, op, srcs, divisor);
}

uint64_t reduce_in_tree(DType dtype, ReduceOp op, std::span<const uint64_t> srcs) {
  if (srcs.size() == 1) return srcs[0];
  const size_t half = srcs.size() - srcs.size() / 2;
  const uint64_t halves[] = {reduce_in_tree(dtype, op, srcs.first(half)),
                             reduce_in_tree(dtype, op, srcs.subspan(half))};
  return reduce_scalars(dtype, op, halves, 1);
}

uint64_t load_bits(DType dtype, const void* base, uint64_t index) {
  const size_t num_bytes = info(dtype).num_bytes;
  uint64_t bits = 0;
  std::memcpy(&bits, static_cast<const std::byte*>(base) + index * num_bytes, num_bytes);
  return bits;
}

void store_bits(DType dtype, void* base, uint64_t index, uint64_t bits) {
  const size_t num_bytes = info(dtype).num_bytes;
  std::memcpy(static_cast<std::byte*>(base) + index * num_bytes, &bits, num_bytes);
}

uint64_t bits_of_integer(DType dtype, int64_t value) {
  if (info(dtype).is_floating) return round_to(dtype, static_cast<double>(value));
  if (dtype == DType::kBool) return value != 0 ? 1 : 0;
  const int unused = 64 - 8 * static_cast<int>(info(dtype).num_bytes);
  return static_cast<uint64_t>(value) << unused >> unused;
}

}  // namespace rota::test
