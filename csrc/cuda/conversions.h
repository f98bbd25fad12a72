// Conversions of narrow floats for which some GPUs have instructions, in software, for the host and
// for GPUs without them. The bits are the same, except for those of a NaN.
#pragma once

#include <cstdint>

#include "base/float_bits.h"

namespace rota::cuda {

struct SoftwareConversions {
  HOST_DEVICE_INLINE static float widen_half(uint32_t code) {
    return widen<float_format(DType::kFloat16)>(code);
  }
  HOST_DEVICE_INLINE static uint32_t narrow_half(float value) {
    return narrow_to_nearest<float_format(DType::kFloat16)>(value);
  }
  // Two neighbours; the first is in the low bits.
  HOST_DEVICE_INLINE static uint32_t narrow_halves(float low, float high) {
    return narrow_half(low) | narrow_half(high) << 16;
  }
  // Two neighbours in scaled blocks. A GPU saturates Inf.
  template <DType dtype>
  HOST_DEVICE_INLINE static uint32_t narrow_float8(float low, float high) {
    constexpr FloatFormat kFormat = float_format(dtype, true);
    return narrow_to_nearest<kFormat>(low) | narrow_to_nearest<kFormat>(high) << 8;
  }
  // Two neighbours in float8_e4m3fn, as float16. The two largest codes, which are NaN or Inf in one
  // of the formats, are not among them.
  HOST_DEVICE_INLINE static uint32_t halves_of_e4m3(uint32_t codes) {
    constexpr FloatFormat kFormat = float_format(DType::kFloat8E4M3);
    return narrow_halves(widen<kFormat>(codes & 0xff), widen<kFormat>(codes >> 8 & 0xff));
  }
};

}  // namespace rota::cuda
