// Decodes and encodes a thread's elements of the rows in flight (cuda/tiles.h), several by one
// instruction where the GPU has it.
#pragma once

#include "cuda/scalar.h"
#include "cuda/tiles.h"

namespace rota::cuda {

// Four codes of float8 in a word: their magnitudes, and what an addition carries into.
inline constexpr uint32_t kOfEach = 0x01010101;
inline constexpr uint32_t kMagnitudes = 0x7f * kOfEach;
inline constexpr uint32_t kCarries = 0x80 * kOfEach;

// Whether a code is one of the two largest, which are NaN or Inf in one of the formats.
HOST_DEVICE_INLINE bool has_largest_e4m3(const RowBits<DType::kFloat8E4M3> (&rows)[kRowsInFlight]) {
  uint32_t sums = 0;
  ROTA_UNROLL
  for (uint32_t r = 0; r < kRowsInFlight; ++r) {
    sums |= (rows[r].words[0] & kMagnitudes) + 0x02 * kOfEach;
  }
  return (sums & kCarries) != 0;
}

// Makes the largest number of float8_e5m2 Inf, whose code comes next.
HOST_DEVICE_INLINE uint32_t largest_to_infinity(uint32_t codes) {
  constexpr uint32_t kLargest = float_format(DType::kFloat8E5M2).max_finite;
  const uint32_t others = ((codes & kMagnitudes) ^ kLargest * kOfEach) + kMagnitudes;
  return codes + ((~others & kCarries) >> 7);
}

// Calls body(row, elem, value) for each element.
template <DType wire, bool is_scaled, typename Block, typename Body>
HOST_DEVICE_INLINE void decode_rows(const Block& block, const RowBits<wire> (&rows)[kRowsInFlight],
                                    const Body& body) {
  if constexpr (wire == DType::kFloat8E4M3) {
    if (!has_largest_e4m3(rows)) {
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r) {
        ROTA_UNROLL
        for (uint32_t i = 0; i < kElemsPerRow; i += 2) {
          const uint32_t halves = block.halves_of_e4m3(rows[r].words[0] >> 8 * i & 0xffff);
          body(r, i, block.widen_half(halves & 0xffff));
          body(r, i + 1, block.widen_half(halves >> 16));
        }
      }
      return;
    }
  }
  for_each_elem([&](uint32_t r, uint32_t i) {
    body(r, i, decode<wire, is_scaled>(block, get_bits<info(wire).num_bytes>(rows[r], i)));
  });
}

// Rounds value_of(row, elem) to nearest.
template <DType wire, bool is_scaled, typename Block, typename ValueOf>
HOST_DEVICE_INLINE void encode_rows(const Block& block, const ValueOf& value_of,
                                    RowBits<wire> (&rows)[kRowsInFlight]) {
  constexpr uint32_t kPairBits = 16 * info(wire).num_bytes;
  const auto encode_pairs = [&](const auto& encode_pair) {
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) {
      ROTA_UNROLL
      for (uint32_t i = 0; i < kElemsPerRow; i += 2) {
        const uint32_t bit = i / 2 * kPairBits;
        rows[r].words[bit / 32] |= encode_pair(value_of(r, i), value_of(r, i + 1)) << bit % 32;
      }
    }
  };
  ROTA_UNROLL
  for (uint32_t r = 0; r < kRowsInFlight; ++r) rows[r] = {};
  if constexpr (wire == DType::kFloat16) {
    encode_pairs([&](float low, float high) { return block.narrow_halves(low, high); });
  } else if constexpr (is_scaled) {
    encode_pairs(
        [&](float low, float high) { return block.template narrow_float8<wire>(low, high); });
    // A GPU saturates Inf. In float8_e4m3fn that is its code; in float8_e5m2 no number in a scaled
    // block is so large.
    if constexpr (wire == DType::kFloat8E5M2) {
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r) {
        rows[r].words[0] = largest_to_infinity(rows[r].words[0]);
      }
    }
  } else {
    for_each_elem([&](uint32_t r, uint32_t i) {
      put_bits<info(wire).num_bytes>(rows[r], i,
                                     encode<wire, is_scaled>(block, value_of(r, i), Rounding{}, 0));
    });
  }
}

}  // namespace rota::cuda
