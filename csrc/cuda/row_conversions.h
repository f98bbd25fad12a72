// Decodes and encodes a thread's elements of the rows in flight (cuda/tiles.h), several by one
// instruction where the GPU has it.
#pragma once

#include "cuda/scalar.h"
#include "cuda/tiles.h"

namespace rota::cuda {

// Whether a code is one of the two largest, which are NaN or Inf in one of the formats.
HOST_DEVICE_INLINE bool has_largest_e4m3(const RowBits<DType::kFloat8E4M3> (&rows)[kRowsInFlight]) {
  uint32_t carries = 0;
  ROTA_UNROLL
  for (uint32_t r = 0; r < kRowsInFlight; ++r) {
    carries |= (rows[r].words[0] & 0x7f7f7f7f) + 0x02020202;
  }
  return (carries & 0x80808080) != 0;
}

template <DType wire, bool is_scaled, typename Block>
HOST_DEVICE_INLINE void decode_rows(const Block& block, const RowBits<wire> (&rows)[kRowsInFlight],
                                    RowPart (&values)[kRowsInFlight]) {
  if constexpr (wire == DType::kFloat8E4M3) {
    if (!has_largest_e4m3(rows)) {
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r) {
        ROTA_UNROLL
        for (uint32_t i = 0; i < kElemsPerRow; i += 2) {
          const uint32_t halves = block.halves_of_e4m3(rows[r].words[0] >> 8 * i & 0xffff);
          values[r].of[i] = block.widen_half(halves & 0xffff);
          values[r].of[i + 1] = block.widen_half(halves >> 16);
        }
      }
      return;
    }
  }
  for_each_elem([&](uint32_t r, uint32_t i) {
    values[r].of[i] = decode<wire, is_scaled>(block, get_bits<info(wire).num_bytes>(rows[r], i));
  });
}

// Whether a value is Inf or NaN.
HOST_DEVICE_INLINE bool has_non_finite(const RowPart (&values)[kRowsInFlight]) {
  uint32_t carries = 0;
  for_each_elem([&](uint32_t r, uint32_t i) {
    constexpr uint32_t kToSign = 0x80000000 - kInfinityBits;
    carries |= (bit_as<uint32_t>(values[r].of[i]) & kMagnitudeMask) + kToSign;
  });
  return (carries & 0x80000000) != 0;
}

// Rounds to nearest.
template <DType wire, bool is_scaled, typename Block>
HOST_DEVICE_INLINE void encode_rows(const Block& block, const RowPart (&values)[kRowsInFlight],
                                    RowBits<wire> (&rows)[kRowsInFlight]) {
  constexpr uint32_t kPairBits = 16 * info(wire).num_bytes;
  const auto encode_pairs = [&](const auto& encode_pair) {
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) {
      ROTA_UNROLL
      for (uint32_t i = 0; i < kElemsPerRow; i += 2) {
        const uint32_t bit = i / 2 * kPairBits;
        rows[r].words[bit / 32] |= encode_pair(values[r].of[i], values[r].of[i + 1]) << bit % 32;
      }
    }
  };
  ROTA_UNROLL
  for (uint32_t r = 0; r < kRowsInFlight; ++r) rows[r] = {};
  if constexpr (wire == DType::kFloat16) {
    return encode_pairs([&](float low, float high) { return block.narrow_halves(low, high); });
  } else if constexpr (is_scaled) {
    // In float8_e4m3fn the code of Inf is that of what is too large.
    if (wire == DType::kFloat8E4M3 || !has_non_finite(values)) {
      return encode_pairs(
          [&](float low, float high) { return block.template narrow_float8<wire>(low, high); });
    }
  }
  for_each_elem([&](uint32_t r, uint32_t i) {
    put_bits<info(wire).num_bytes>(rows[r], i,
                                   encode<wire, is_scaled>(block, values[r].of[i], Rounding{}, 0));
  });
}

}  // namespace rota::cuda
