// Widens one element of any dtype to the accumulate dtype and rounds it back. The formulas are in
// base/float_bits.h, which the CPU's loops use too; for float16 a block may have instructions that
// give the same bits.
#pragma once

#include <cstdint>

#include "base/float_bits.h"
#include "base/random_bits.h"
#include "base/tile.h"
#include "cuda/words.h"

namespace rota::cuda {

// How results are rounded to a narrow float.
struct Rounding {
  bool is_stochastic;  // else to nearest, ties to even
  uint64_t seed;
  uint64_t stream;

  // The random number of an element, counted from the start of the tensor.
  HOST_DEVICE uint32_t random(uint64_t elem) const {
    const uint32_t key = tile_key(seed, stream, elem / kTileElems);
    return random_of(key + static_cast<uint32_t>(elem % kTileElems));
  }
};

template <DType dtype>
struct NativeOf;
template <>
struct NativeOf<DType::kFloat32> {
  using type = float;
};
template <>
struct NativeOf<DType::kFloat64> {
  using type = double;
};
template <>
struct NativeOf<DType::kUInt8> {
  using type = uint8_t;
};
template <>
struct NativeOf<DType::kInt8> {
  using type = int8_t;
};
template <>
struct NativeOf<DType::kInt16> {
  using type = int16_t;
};
template <>
struct NativeOf<DType::kInt32> {
  using type = int32_t;
};
template <>
struct NativeOf<DType::kInt64> {
  using type = int64_t;
};
template <>
struct NativeOf<DType::kBool> {
  using type = uint8_t;
};
template <DType dtype>
using AccOf = typename NativeOf<info(dtype).accumulate>::type;

template <DType dtype>
using ElemBits = BitsOf<info(dtype).num_bytes>;

HOST_DEVICE constexpr bool is_narrow(DType dtype) {
  return info(dtype).is_floating && info(dtype).num_bytes < 4;
}

// Converts an element's bits to the accumulate dtype.
template <DType dtype, bool is_scaled, typename Block>
HOST_DEVICE_INLINE AccOf<dtype> decode(const Block& block, ElemBits<dtype> bits) {
  if constexpr (dtype == DType::kFloat64)
    return bit_as<double>(bits);
  else if constexpr (dtype == DType::kFloat32)
    return bit_as<float>(bits);
  else if constexpr (dtype == DType::kFloat16)
    return block.widen_half(bits);
  else if constexpr (info(dtype).is_floating && info(dtype).num_bytes == 1) {
    constexpr FloatFormat kFormat = float_format(dtype, is_scaled);
    return block.widen_half(float16_of<kFormat>(bits)) * float16_factor(kFormat);
  } else if constexpr (is_narrow(dtype))
    return widen<float_format(dtype, is_scaled)>(bits);
  // Any byte but 0 is true, as torch reads it.
  else if constexpr (dtype == DType::kBool)
    return bits != 0;
  else
    return static_cast<AccOf<dtype>>(bits);
}

// Converts back, rounding once. elem: counted from the start of the tensor.
template <DType dtype, bool is_scaled, typename Block>
HOST_DEVICE_INLINE ElemBits<dtype> encode(const Block& block, AccOf<dtype> value,
                                          const Rounding& rounding, uint64_t elem) {
  if constexpr (dtype == DType::kFloat64) {
    return bit_as<uint64_t>(value);
  } else if constexpr (dtype == DType::kFloat32) {
    return bit_as<uint32_t>(value);
  } else if constexpr (is_narrow(dtype)) {
    constexpr FloatFormat kFormat = float_format(dtype, is_scaled);
    if (rounding.is_stochastic) return narrow_at_random<kFormat>(value, rounding.random(elem));
    if constexpr (dtype == DType::kFloat16) return block.narrow_half(value);
    return narrow_to_nearest<kFormat>(value);
  } else {
    // Through the unsigned type, which drops the sign extension.
    return static_cast<std::make_unsigned_t<AccOf<dtype>>>(value);
  }
}

}  // namespace rota::cuda
