// The scale of a block of the wire format (base/wire_format.h), by way of float32's exponent field:
// one text for scalars, on the host and in CUDA kernels, and for GCC's vectors. F and U as in
// base/float_bits.h.
#pragma once

#include <cstdint>

#include "base/float_bits.h"
#include "base/wire_format.h"

namespace rota {

template <typename U>
HOST_DEVICE_INLINE constexpr U larger_of(U a, U b) {
  return a > b ? a : b;
}

// The exponent plus kScaleBias of the scale that a block gets; largest: its largest finite
// magnitude, as bits.
template <DType dtype, typename U>
HOST_DEVICE_INLINE constexpr U biased_scale(U largest) {
  constexpr uint32_t kTop = block_scaling(dtype).top_exponent;
  constexpr uint32_t kMin = kMinScaleExponent + kScaleBias;
  // The biased exponent of float32, which is 0 for denormals: they end at kMin like all below it.
  const U scale = larger_of(largest >> kMantissaBits, U{} + (kMin + kTop)) - kTop;
  return largest == 0 ? U{} + kScaleBias : scale;
}

// What a block is multiplied by to read it, and to write it.
template <typename F = float, typename U>
HOST_DEVICE_INLINE constexpr F scale_of(U biased) {
  return bit_as<F>(biased << kMantissaBits);
}
template <typename F = float, typename U>
HOST_DEVICE_INLINE constexpr F inverse_scale_of(U biased) {
  return bit_as<F>((2 * kScaleBias - biased) << kMantissaBits);
}

}  // namespace rota
