// How a thread reads, decodes, encodes and writes 16 bytes of neighbouring elements in one wire
// format (base/wire_format.h). Threads that share a scaled block find its scale together.
#pragma once

#include "base/block_scale.h"
#include "cuda/scalar.h"
#include "cuda/words.h"

namespace rota::cuda {

template <DType dtype, bool is_scaled = false>
struct Codec {
  HOST_DEVICE static constexpr WireFormat format() { return {dtype, is_scaled}; }
  static constexpr size_t kElemBytes = info(dtype).num_bytes;
  using Acc = AccOf<dtype>;

  // A unit is what kLanes neighbouring threads work on at a time, kElems elements each: a scaled
  // block, or what one thread moves.
  static constexpr uint32_t kElems = kAccessBytes / kElemBytes;
  static constexpr uint32_t kLanes = is_scaled ? block_scaling(dtype).block_elems / kElems : 1;
  static constexpr uint32_t kUnitElems = kLanes * kElems;
  static_assert(kGranuleElems % kUnitElems == 0, "shards are whole units");

  struct Values {
    Acc of[kElems];
  };
  // Elements in the wire format; `scale` is used only with block scaling.
  struct Encoded {
    Words<kAccessBytes> payload;
    uint32_t scale;
  };

  // Reads elements [elem, elem + kElems) of a place, of which only the first num_elems exist.
  // kIsWhole: all or none exist, and the place is aligned.
  template <bool kIsWhole, typename Block>
  HOST_DEVICE_INLINE static Encoded read(const Block& block, const WirePlace& place, uint32_t elem,
                                         uint32_t num_elems) {
    Encoded encoded{};
    const std::byte* payload = place.payload + size_t{elem} * kElemBytes;
    if constexpr (kIsWhole) {
      if (num_elems != 0) encoded.payload = block.template load<sizeof(encoded.payload)>(payload);
    } else {
      encoded.payload = load_part<kElemBytes, sizeof(encoded.payload)>(payload, num_elems);
    }
    if constexpr (is_scaled) {
      encoded.scale =
          num_elems == 0 ? kScaleBias : static_cast<uint32_t>(place.scales[elem / kUnitElems]);
    }
    return encoded;
  }
  template <bool kIsWhole, typename Block>
  HOST_DEVICE_INLINE static void write(const Block& block, const WirePlace& place, uint32_t elem,
                                       uint32_t num_elems, const Encoded& encoded) {
    std::byte* payload = place.payload + size_t{elem} * kElemBytes;
    if constexpr (kIsWhole) {
      if (num_elems != 0) block.store(payload, encoded.payload);
    } else {
      store_part<kElemBytes>(payload, num_elems, encoded.payload);
    }
    if constexpr (is_scaled) {
      const bool is_first_of_block = elem % kUnitElems == 0 && num_elems != 0;
      if (is_first_of_block) {
        place.scales[elem / kUnitElems] = static_cast<std::byte>(encoded.scale);
      }
    }
  }

  template <typename Block>
  HOST_DEVICE_INLINE static Values decode(const Block& block, const Encoded& encoded) {
    Values values;
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElems; ++i) {
      const auto bits = get_bits<kElemBytes>(encoded.payload, i);
      values.of[i] = rota::cuda::decode<dtype, is_scaled>(block, bits);
      if constexpr (is_scaled) values.of[i] *= scale_of(encoded.scale);
    }
    return values;
  }

  // All kLanes threads of a unit call this together. elem: counted from the start of the tensor.
  template <typename Block>
  HOST_DEVICE_INLINE static Encoded encode(const Block& block, const Values& values,
                                           const Rounding& rounding, uint64_t elem) {
    Encoded encoded{};
    float inverse = 1;
    if constexpr (is_scaled) {
      encoded.scale = biased_scale<dtype>(largest_finite_of_block(block, values));
      inverse = inverse_scale_of(encoded.scale);
    }
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElems; ++i) {
      Acc value = values.of[i];
      if constexpr (is_scaled) value *= inverse;
      put_bits<kElemBytes>(encoded.payload, i,
                           rota::cuda::encode<dtype, is_scaled>(block, value, rounding, elem + i));
    }
    return encoded;
  }

  // Partial sums, in the accumulate dtype in a slot. They are moved whole, or not at all if
  // num_elems is 0.
  template <typename Block>
  HOST_DEVICE_INLINE static Values read_partial(const Block& block, const std::byte* src,
                                                uint32_t elem, uint32_t num_elems) {
    Words<sizeof(Values)> words{};
    if (num_elems != 0)
      words = block.template load<sizeof(Values)>(src + size_t{elem} * sizeof(Acc));
    return __builtin_bit_cast(Values, words);
  }
  template <typename Block>
  HOST_DEVICE_INLINE static void write_partial(const Block& block, std::byte* dst, uint32_t elem,
                                               uint32_t num_elems, const Values& values) {
    if (num_elems == 0) return;
    block.store(dst + size_t{elem} * sizeof(Acc),
                __builtin_bit_cast(Words<sizeof(Values)>, values));
  }

 private:
  // Ignores Inf and NaN.
  template <typename Block>
  HOST_DEVICE_INLINE static uint32_t largest_finite_of_block(const Block& block,
                                                             const Values& values) {
    uint32_t largest = 0;
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElems; ++i) {
      const uint32_t magnitude = bit_as<uint32_t>(values.of[i]) & kMagnitudeMask;
      if (magnitude < kInfinityBits) largest = larger_of(largest, magnitude);
    }
    return block.template largest_of_lanes<kLanes>(largest);
  }
};

}  // namespace rota::cuda
