// From gradients to the wire format, a list of tensors in one launch and one pass: scale, add what
// the last rounding lost, round in scaled blocks, and count what is not finite. As the CPU does it
// in cpu/bucket_reducer.cpp, with the same bits.
#pragma once

#include "cuda/system_word.h"
#include "cuda/tiles.h"

namespace rota::cuda {

// dtype: of the gradients; wire, is_scaled: what they are rounded to.
template <DType dtype, DType wire, bool is_scaled, typename Block>
class Packer {
 public:
  HOST_DEVICE Packer(const Block& block, const PackArgs& args)
      : block_(block), thread_(block), args_(args) {}

  HOST_DEVICE void run() {
    const uint64_t num_tiles = args_.bucket.num_tiles;
    const uint64_t stride = thread_.tile_stride();
    for (uint64_t index = thread_.first_tile(); index < num_tiles; index += stride) {
      const Tile tile = args_.bucket.tiles[index];
      if (tile.is_whole()) {
        pack_tile<true>(tile, index);
      } else {
        pack_tile<false>(tile, index);
      }
    }
    if (num_non_finite_ != 0) {
      SystemWord<uint64_t>(*args_.bucket.num_non_finite)
          .fetch_add(num_non_finite_, MemoryOrder::relaxed);
    }
  }

 private:
  static constexpr size_t kWireBytes = info(wire).num_bytes;
  static constexpr uint32_t kRowsInFlight = rows_in_flight(dtype);
  static constexpr uint32_t kRowsPerBlock = block_scaling(wire).block_elems / kRowElems;

  template <bool kIsWhole>
  HOST_DEVICE void pack_tile(const Tile& tile, uint64_t index) {
    for (uint32_t first = 0; first < kTileRows; first += kRowsInFlight) {
      RowPart rows[kRowsInFlight];
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r) {
        rows[r] = load_gradients<kIsWhole>(tile, first + r);
      }
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r)
        add_residual(rows[r], first + r, index, tile.num_elems);
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; r += kRowsPerBlock) {
        RowPart block_rows[kRowsPerBlock];
        ROTA_UNROLL
        for (uint32_t i = 0; i < kRowsPerBlock; ++i) block_rows[i] = rows[r + i];
        write_block(block_rows, first + r, index, tile.num_elems);
      }
    }
  }

  template <bool kIsWhole>
  HOST_DEVICE_INLINE RowPart load_gradients(const Tile& tile, uint32_t row) {
    const auto words = thread_.template read<dtype, kIsWhole>(tile.data, row, tile.num_elems);
    RowPart gradients;
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElemsPerRow; ++i) {
      const auto bits = get_bits<info(dtype).num_bytes>(words, i);
      gradients.of[i] = static_cast<float>(decode<dtype, false>(block_, bits));
      num_non_finite_ += is_finite(gradients.of[i]) ? 0 : 1;
    }
    return gradients;
  }

  // From gradients to what is wanted on the wire.
  HOST_DEVICE_INLINE void add_residual(RowPart& part, uint32_t row, uint64_t index,
                                       uint64_t num_elems) const {
    const float factor = args_.bucket.contribution_factor;
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElemsPerRow; ++i) part.of[i] *= factor;
    if (args_.residual == nullptr) return;
    const uint32_t num_left = thread_.num_left(row, num_elems);
    const auto lost = thread_.template read<DType::kFloat32>(residual_of(index), row);
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElemsPerRow; ++i) {
      if (i < num_left) part.of[i] += bit_as<float>(lost.words[i]) / args_.bucket.result_factor;
    }
  }

  // Rounds the rows that share a scale, stores them, and remembers what rounding lost.
  HOST_DEVICE_INLINE void write_block(const RowPart (&rows)[kRowsPerBlock], uint32_t row,
                                      uint64_t index, uint64_t num_elems) const {
    const uint64_t first_elem = index * kTileElems;
    const WirePlace place =
        format().from(format().place(args_.bucket.wire, args_.bucket.num_elems()), first_elem);
    uint32_t scale = kScaleBias;
    if constexpr (is_scaled) {
      scale = biased_scale<wire>(thread_.largest(largest_finite(rows)));
      if (thread_.is_first()) place.scales[row / kRowsPerBlock] = static_cast<std::byte>(scale);
    }
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsPerBlock; ++r) {
      Words<kElemsPerRow * kWireBytes> words{};
      Words<kElemsPerRow * sizeof(float)> lost;
      const uint32_t num_left = thread_.num_left(row + r, num_elems);
      ROTA_UNROLL
      for (uint32_t i = 0; i < kElemsPerRow; ++i) {
        const float wanted = rows[r].of[i];
        const float scaled = is_scaled ? wanted * inverse_scale_of(scale) : wanted;
        const uint64_t elem = first_elem + thread_.elem(row + r) + i;
        const auto bits = encode<wire, is_scaled>(block_, scaled, args_.rounding, elem);
        put_bits<kWireBytes>(words, i, bits);
        const float decoded = decode<wire, is_scaled>(block_, bits);
        const float sent = is_scaled ? decoded * scale_of(scale) : decoded;
        const float rest = (wanted - sent) * args_.bucket.result_factor;
        lost.words[i] = bit_as<uint32_t>(is_finite(rest) && i < num_left ? rest : 0.0f);
      }
      thread_.template write<wire>(place.payload, row + r, words);
      if (args_.residual != nullptr) {
        thread_.template write<DType::kFloat32>(residual_of(index), row + r, lost);
      }
    }
  }

  HOST_DEVICE_INLINE static uint32_t largest_finite(const RowPart (&rows)[kRowsPerBlock]) {
    uint32_t largest = 0;
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsPerBlock; ++r) {
      ROTA_UNROLL
      for (uint32_t i = 0; i < kElemsPerRow; ++i) {
        const uint32_t magnitude = bit_as<uint32_t>(rows[r].of[i]) & kMagnitudeMask;
        if (magnitude < kInfinityBits) largest = larger_of(largest, magnitude);
      }
    }
    return largest;
  }

  HOST_DEVICE std::byte* residual_of(uint64_t index) const {
    return reinterpret_cast<std::byte*>(args_.residual + index * kTileElems);
  }
  HOST_DEVICE static constexpr WireFormat format() { return {wire, is_scaled}; }

  const Block& block_;
  TileThread<Block> thread_;
  const PackArgs& args_;
  uint32_t num_non_finite_ = 0;
};

template <DType dtype, DType wire, bool is_scaled, typename Block>
HOST_DEVICE void pack(const Block& block, const PackArgs& args) {
  Packer<dtype, wire, is_scaled, Block>(block, args).run();
}

}  // namespace rota::cuda
