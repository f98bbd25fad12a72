// How elements travel between ranks: their dtype and, with block scaling, one byte per block: the
// power of two that the block was divided by, biased by 127 (E8M0 of the OCP Microscaling Formats
// specification 1.0). All payload comes first, then all scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"

namespace rota {

// Where elements in the wire format lie.
struct WirePlace {
  std::byte* payload;
  std::byte* scales;
};

// Scaling brings a block's largest finite magnitude into [2^top_exponent, 2^(top_exponent + 1)),
// and rounding it never reaches the dtype's largest number. In float8_e4m3fn, which has no Inf, the
// largest code is therefore free to represent Inf.
//
// Block lengths: 64, because shorter blocks take longer (benchmarks/LOG.md) and are no more
// accurate on gradients; for float8_e4m3fn, which has the smallest range, 32 as in the
// specification.
struct BlockScaling {
  uint32_t block_elems;
  int top_exponent;
};

// The dtypes that gradients may have, and the dtypes that they may travel in.
HOST_DEVICE constexpr bool is_bucket_dtype(DType dtype) {
  return info(dtype).is_floating && info(dtype).num_bytes > 1;
}
HOST_DEVICE constexpr bool is_wire_dtype(DType dtype) {
  return info(dtype).is_floating && dtype != DType::kFloat64;
}

HOST_DEVICE constexpr bool has_block_scaling(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}
HOST_DEVICE constexpr BlockScaling block_scaling(DType dtype) {
  if (dtype == DType::kFloat8E4M3) return {32, 7};
  return {64, 14};
}

// Limits scales so that multiplying by them in float32 loses nothing: at 2^-125 the smallest
// denormal of float16 (2^-24) becomes that of float32 (2^-149).
inline constexpr int kMinScaleExponent = -125;
inline constexpr int kScaleBias = 127;

struct WireFormat {
  DType dtype;
  bool is_block_scaled = false;

  HOST_DEVICE constexpr size_t payload_bytes(uint64_t num_elems) const {
    return num_elems * info(dtype).num_bytes;
  }
  HOST_DEVICE constexpr size_t num_scales(uint64_t num_elems) const {
    if (!is_block_scaled) return 0;
    const uint32_t block_elems = block_scaling(dtype).block_elems;
    return (num_elems + block_elems - 1) / block_elems;
  }
  HOST_DEVICE constexpr size_t num_bytes(uint64_t num_elems) const {
    return payload_bytes(num_elems) + num_scales(num_elems);
  }
  // The most elements that fit in num_bytes_given, a multiple of granule_elems.
  HOST_DEVICE constexpr uint64_t capacity(size_t num_bytes_given, uint64_t granule_elems) const {
    return num_bytes_given / num_bytes(granule_elems) * granule_elems;
  }

  HOST_DEVICE WirePlace place(std::byte* base, uint64_t num_elems) const {
    return {base, base + payload_bytes(num_elems)};
  }
  // The place of the elements from `elem` on; `elem` must start a block.
  HOST_DEVICE WirePlace from(const WirePlace& place, uint64_t elem) const {
    return {place.payload + payload_bytes(elem), place.scales + num_scales(elem)};
  }

  bool operator==(const WireFormat&) const = default;
};

}  // namespace rota
