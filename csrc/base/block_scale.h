// The scale of a block in the wire format (base/wire_format.h), computed on float32's exponent
// field. One implementation serves scalars, on the host and in CUDA kernels, and GCC's vectors. F
// and U are as in base/float_bits.h.
#pragma once

#include <cstdint>

#include "base/float_bits.h"
#include "base/wire_format.h"

namespace rota {

template <typename U>
HOST_DEVICE_INLINE constexpr U larger_of(U a, U b) {
  return a > b ? a : b;
}

// The exponent of a block's scale, plus kScaleBias. largest: the bits of the block's largest finite
// magnitude.
template <DType dtype, typename U>
HOST_DEVICE_INLINE constexpr U biased_scale(U largest) {
  constexpr uint32_t kTop = block_scaling(dtype).top_exponent;
  constexpr uint32_t kMin = kMinScaleExponent + kScaleBias;
  // float32's biased exponent, which is 0 for denormals: their scale is clamped to kMin.
  const U scale = larger_of(largest >> kMantissaBits, U{} + (kMin + kTop)) - kTop;
  return largest == 0 ? U{} + kScaleBias : scale;
}

// The factor that decodes a block, and the one that encodes it.
template <typename F = float, typename U>
HOST_DEVICE_INLINE constexpr F scale_of(U biased) {
  return bit_as<F>(biased << kMantissaBits);
}
template <typename F = float, typename U>
HOST_DEVICE_INLINE constexpr F inverse_scale_of(U biased) {
  return bit_as<F>((2 * kScaleBias - biased) << kMantissaBits);
}

}  // namespace rota
