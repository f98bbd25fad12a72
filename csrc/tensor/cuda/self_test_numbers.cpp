#include "tensor/cuda/self_test_numbers.h"

#include <cmath>
#include <cstring>

#include "base/random_bits.h"
#include "base/tile.h"
#include "cpu/element_loops.h"

namespace rota::tensors {
namespace {

void store_bits(uint64_t bits, DType dtype, std::byte* dst) {
  if (dtype == DType::kBool) bits &= 1;
  std::memcpy(dst, &bits, info(dtype).num_bytes);  // the low bytes: hosts of GPUs are little-endian
}

void store(double number, DType dtype, void* dst) {
  if (dtype == DType::kFloat64) {
    std::memcpy(dst, &number, sizeof(number));
    return;
  }
  const auto rounded = static_cast<float>(number);
  if (dtype == DType::kFloat32) {
    std::memcpy(dst, &rounded, sizeof(rounded));
  } else {
    cpu::element_loops().convert(DType::kFloat32, dtype)(&rounded, dst, 1);
  }
}

// The exponent of 1 is all ones but for its first bit.
int num_mantissa_bits(DType dtype) {
  uint64_t one = 0;
  store(1, dtype, &one);
  return std::countr_zero(one);
}

// A number of similar magnitude to the others, so that their sums round.
void store_number(uint64_t random, DType dtype, std::byte* dst) {
  const double mantissa = 1 + std::ldexp(static_cast<double>(random >> 12), -52);
  const double magnitude = std::ldexp(mantissa, static_cast<int>(random & 15) - 12);
  store((random & 16) != 0 ? -magnitude : magnitude, dtype, dst);
}

// The kind of number depends on the place alone, so that extremes are summed with extremes.
void store_float(uint64_t place, uint64_t random, DType dtype, Extremes extremes, std::byte* dst) {
  const int num_bits = static_cast<int>(info(dtype).num_bytes) * 8;
  const uint64_t sign = uint64_t{1} << (num_bits - 1);
  const uint64_t mantissa = (uint64_t{1} << num_mantissa_bits(dtype)) - 1;
  if (extremes == Extremes::kSome && place / kGranuleElems % 3 == 2) {
    const uint64_t inf = (sign - 1) & ~mantissa;
    return store_bits(place % 5 == 0 ? inf | (random & sign) : random, dtype, dst);
  }
  switch (place % 37) {
    case 5:
      return store_bits(sign, dtype, dst);  // negative zero
    case 6:
      return store_bits(1 | (random & sign), dtype, dst);  // the smallest denormal
    case 7:
      return store_bits(mantissa | (random & sign), dtype, dst);  // the largest denormal
    default:
      return store_number(random, dtype, dst);
  }
}

}  // namespace

std::vector<std::byte> plain_numbers(DType dtype, uint64_t num_elems, Extremes extremes,
                                     uint64_t seed) {
  const size_t elem_bytes = info(dtype).num_bytes;
  std::vector<std::byte> numbers(num_elems * elem_bytes);
  for (uint64_t i = 0; i < num_elems; ++i) {
    const uint64_t random = mix(mix(seed) + i);
    std::byte* dst = numbers.data() + i * elem_bytes;
    if (info(dtype).is_floating) {
      store_float(i, random, dtype, extremes, dst);
    } else {
      store_bits(random, dtype, dst);
    }
  }
  return numbers;
}

std::vector<std::byte> numbers(const WireFormat& format, uint64_t num_elems, Extremes extremes,
                               uint64_t seed) {
  if (!format.is_block_scaled) return plain_numbers(format.dtype, num_elems, extremes, seed);
  const std::vector<std::byte> floats = plain_numbers(DType::kFloat32, num_elems, extremes, seed);
  std::vector<std::byte> encoded(format.num_bytes(num_elems));
  cpu::element_loops().wire(format).encode(reinterpret_cast<const float*>(floats.data()),
                                           format.place(encoded.data(), num_elems), num_elems, 1);
  return encoded;
}

}  // namespace rota::tensors
