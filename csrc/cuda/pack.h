// Packs gradients into the wire format, a list of tensors in one launch and one pass: scales them,
// adds what the last rounding lost, and rounds, in scaled blocks if asked for. Gives the same bits
// as the CPU (cpu/bucket_reducer.cpp).
#pragma once

#include "cuda/row_conversions.h"
#include "cuda/tiles.h"

namespace rota::cuda {

// dtype: of the gradients; wire, is_scaled: what they are rounded to.
template <DType dtype, DType wire, bool is_scaled, typename Block>
class Packer {
 public:
  HOST_DEVICE Packer(const Block& block, const PackArgs& args)
      : block_(block), thread_(block), args_(args) {}

  HOST_DEVICE void run() {
    UnpackWords& words = *args_.words;
    // A memset would be another launch. This launch ends before unpack starts.
    if (block_.index() == 0 && block_.thread() == 0) words.put_to_rest();
    const uint64_t num_tiles = args_.bucket.num_tiles;
    const uint64_t stride = thread_.item_stride();
    const auto tile_at = [&](uint64_t index) {
      return index < num_tiles ? args_.bucket.tile(index, kElemBytes) : Tile{};
    };
    uint64_t index = thread_.first_item();
    Tile tile = tile_at(index);
    Tile next = tile_at(index + stride);
    Gradients<dtype> ahead;
    if constexpr (kLoadsAhead) fetch_whole(tile, ahead);
    for (; index < num_tiles; index += stride) {
      // While this tile is worked on, the next one's gradients are loaded, and of the one after
      // that where they are.
      Gradients<dtype> gradients;
      Tile after_next{};
      if constexpr (kLoadsAhead) {
        gradients = ahead;
        fetch_whole(next, ahead);
        after_next = tile_at(index + 2 * stride);
      } else {
        fetch_whole(tile, gradients);
      }
      if (tile.is_whole(kElemBytes)) {
        pack_rows<true>(tile, index, gradients);
      } else {
        pack_rows<false>(tile, index, gradients);
      }
      tile = next;
      next = kLoadsAhead ? after_next : tile_at(index + 2 * stride);
    }
  }

 private:
  static constexpr size_t kElemBytes = info(dtype).num_bytes;
  static constexpr size_t kWireBytes = info(wire).num_bytes;
  static constexpr uint32_t kRowsPerBlock = block_scaling(wire).block_elems / kRowElems;
  // There are no registers for two tiles of float64.
  static constexpr bool kLoadsAhead = kElemBytes < 8;
  static_assert(kRowsInFlight % kRowsPerBlock == 0, "a team has whole scaled blocks");

  HOST_DEVICE uint32_t first_row() const { return thread_.team() * kRowsInFlight; }

  // Starts to load the gradients of a whole tile.
  HOST_DEVICE_INLINE void fetch_whole(const Tile& tile, Gradients<dtype>& gradients) const {
    if (tile.is_whole(kElemBytes)) thread_.request_gradients(tile.data, first_row(), gradients);
  }

  // Packs this team's quarter of a tile; `gradients`: those that were fetched of a whole one.
  template <bool kIsWhole>
  HOST_DEVICE void pack_rows(const Tile& tile, uint64_t index, Gradients<dtype>& gradients) const {
    const WirePlace place = format().from(
        format().place(args_.bucket.wire, args_.bucket.num_elems()), index * kTileElems);
    std::byte* residual = args_.residual == nullptr
                              ? nullptr
                              : reinterpret_cast<std::byte*>(args_.residual + index * kTileElems);
    const uint32_t row = first_row();
    if constexpr (kIsWhole) {
      thread_.sort_gradients(tile.data, gradients);
    } else {
      thread_.template read<dtype, false>(tile.data, row, gradients.rows, tile.num_elems);
    }
    RowPart wanted[kRowsInFlight];
    scale_gradients(gradients, wanted);
    if (residual != nullptr) add_residual<kIsWhole>(residual, row, tile.num_elems, wanted);

    uint32_t scales[kRowsInFlight];
    RowBits<wire> sent[kRowsInFlight];
    find_scales(wanted, place, row, scales);
    // One branch here, not one per element, which would keep the elements' instructions apart.
    if (args_.rounding.is_stochastic) {
      round_at_random(wanted, scales, index * kTileElems, row, sent);
    } else {
      round_to_nearest(wanted, scales, sent);
    }
    if (residual != nullptr) {
      store_residual<kIsWhole>(wanted, scales, sent, residual, row, tile.num_elems);
    }
    thread_.template write<wire>(place.payload, row, sent);
  }

  HOST_DEVICE_INLINE void scale_gradients(const Gradients<dtype>& gradients,
                                          RowPart (&wanted)[kRowsInFlight]) const {
    for_each_elem([&](uint32_t r, uint32_t i) {
      const auto gradient = static_cast<float>(
          decode<dtype, false>(block_, get_bits<kElemBytes>(gradients.rows[r], i)));
      wanted[r].of[i] = gradient * args_.bucket.contribution_factor;
    });
  }

  template <bool kIsWhole>
  HOST_DEVICE_INLINE void add_residual(const std::byte* residual, uint32_t row, uint64_t num_elems,
                                       RowPart (&wanted)[kRowsInFlight]) const {
    RowBits<DType::kFloat32> lost[kRowsInFlight];
    thread_.template read<DType::kFloat32, kIsWhole>(residual, row, lost, num_elems);
    for_each_elem([&](uint32_t r, uint32_t i) {
      if (!kIsWhole && i >= thread_.num_left(row + r, num_elems)) return;
      wanted[r].of[i] += bit_as<float>(lost[r].words[i]) / args_.bucket.result_factor;
    });
  }

  // Finds the scale of each row; rows of one scaled block share it. The team's first thread stores
  // it.
  HOST_DEVICE_INLINE void find_scales(const RowPart (&wanted)[kRowsInFlight],
                                      const WirePlace& place, uint32_t row,
                                      uint32_t (&scales)[kRowsInFlight]) const {
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) {
      if constexpr (!is_scaled) {
        scales[r] = kScaleBias;
      } else if (r % kRowsPerBlock != 0) {
        scales[r] = scales[r - 1];
      } else {
        uint32_t largest = largest_finite(wanted[r]);
        if constexpr (kRowsPerBlock == 2) {
          largest = larger_of(largest, largest_finite(wanted[r + 1]));
        }
        scales[r] = biased_scale<wire>(thread_.largest_of_team(largest));
        if (thread_.is_first_of_team()) {
          place.scales[(row + r) / kRowsPerBlock] = static_cast<std::byte>(scales[r]);
        }
      }
    }
  }

  HOST_DEVICE_INLINE void round_to_nearest(const RowPart (&wanted)[kRowsInFlight],
                                           const uint32_t (&scales)[kRowsInFlight],
                                           RowBits<wire> (&sent)[kRowsInFlight]) const {
    const auto value_of = [&](uint32_t r, uint32_t i) {
      return scaled(wanted[r].of[i], scales[r]);
    };
    encode_rows<wire, is_scaled>(block_, value_of, sent);
  }
  HOST_DEVICE_INLINE void round_at_random(const RowPart (&wanted)[kRowsInFlight],
                                          const uint32_t (&scales)[kRowsInFlight],
                                          uint64_t first_elem, uint32_t row,
                                          RowBits<wire> (&sent)[kRowsInFlight]) const {
    const Rounding rounding{true, args_.rounding.seed, args_.rounding.stream};
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) sent[r] = {};
    for_each_elem([&](uint32_t r, uint32_t i) {
      const float value = scaled(wanted[r].of[i], scales[r]);
      const uint64_t elem = first_elem + thread_.elem(row + r) + i;
      put_bits<kWireBytes>(sent[r], i, encode<wire, is_scaled>(block_, value, rounding, elem));
    });
  }

  HOST_DEVICE_INLINE static float scaled(float value, uint32_t scale) {
    return is_scaled ? value * inverse_scale_of(scale) : value;
  }

  // Stores what rounding has lost, in units of the result.
  template <bool kIsWhole>
  HOST_DEVICE_INLINE void store_residual(const RowPart (&wanted)[kRowsInFlight],
                                         const uint32_t (&scales)[kRowsInFlight],
                                         const RowBits<wire> (&sent)[kRowsInFlight],
                                         std::byte* residual, uint32_t row,
                                         uint64_t num_elems) const {
    RowBits<DType::kFloat32> lost[kRowsInFlight];
    for_each_elem([&](uint32_t r, uint32_t i) {
      const float decoded = decode<wire, is_scaled>(block_, get_bits<kWireBytes>(sent[r], i));
      const float read = is_scaled ? decoded * scale_of(scales[r]) : decoded;
      const float rest = (wanted[r].of[i] - read) * args_.bucket.result_factor;
      lost[r].words[i] = bit_as<uint32_t>(is_finite(rest) ? rest : 0.0f);
    });
    thread_.template write<DType::kFloat32, kIsWhole>(residual, row, lost, num_elems);
  }

  HOST_DEVICE_INLINE static uint32_t largest_finite(const RowPart& row) {
    uint32_t largest = 0;
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElemsPerRow; ++i) {
      const uint32_t magnitude = bit_as<uint32_t>(row.of[i]) & kMagnitudeMask;
      if (magnitude < kInfinityBits) largest = larger_of(largest, magnitude);
    }
    return largest;
  }

  HOST_DEVICE static constexpr WireFormat format() { return {wire, is_scaled}; }

  const Block& block_;
  TileThread<Block> thread_;
  const PackArgs& args_;
};

template <DType dtype, DType wire, bool is_scaled, typename Block>
HOST_DEVICE void pack(const Block& block, const PackArgs& args) {
  Packer<dtype, wire, is_scaled, Block>(block, args).run();
}

}  // namespace rota::cuda
