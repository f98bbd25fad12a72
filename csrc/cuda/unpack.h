// From the wire format to gradients, a list of tensors in one launch and one pass: unscale, store,
// count what is not finite and sum up the squares of what is stored. As the CPU does it in
// cpu/bucket_reducer.cpp, with the same bits, the norm's included: squares are summed by tile, and
// tiles in the fixed tree of base/fixed_tree.h by the block that ends last.
#pragma once

#include "base/fixed_tree.h"
#include "cuda/system_word.h"
#include "cuda/tiles.h"

namespace rota::cuda {

// dtype: of the gradients; wire, is_scaled: what they come from.
template <DType dtype, DType wire, bool is_scaled, typename Block>
class Unpacker {
 public:
  HOST_DEVICE Unpacker(const Block& block, const UnpackArgs& args)
      : block_(block), thread_(block), args_(args) {}

  HOST_DEVICE void run() {
    const uint64_t num_tiles = args_.bucket.num_tiles;
    const uint64_t stride = thread_.tile_stride();
    for (uint64_t index = thread_.first_tile(); index < num_tiles; index += stride) {
      const Tile tile = args_.bucket.tiles[index];
      const double squares =
          tile.is_whole() ? unpack_tile<true>(tile, index) : unpack_tile<false>(tile, index);
      if (thread_.is_first()) args_.squares[index] = squares;
    }
    if (num_non_finite_ != 0) {
      SystemWord<uint64_t>(*args_.bucket.num_non_finite)
          .fetch_add(num_non_finite_, MemoryOrder::relaxed);
    }
    sum_up_in_last_block();
  }

 private:
  static constexpr uint32_t kRowsInFlight = rows_in_flight(dtype);
  static constexpr uint32_t kRowsPerBlock = block_scaling(wire).block_elems / kRowElems;

  template <bool kIsWhole>
  HOST_DEVICE double unpack_tile(const Tile& tile, uint64_t index) {
    const WirePlace place = format().from(
        format().place(args_.bucket.wire, args_.bucket.num_elems()), index * kTileElems);
    double squares[kElemsPerRow] = {};
    for (uint32_t first = 0; first < kTileRows; first += kRowsInFlight) {
      Words<kElemsPerRow * info(wire).num_bytes> words[kRowsInFlight];
      uint32_t scales[kRowsInFlight];
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r) {
        words[r] = thread_.template read<wire>(place.payload, first + r);
        if constexpr (is_scaled) {
          scales[r] = static_cast<uint32_t>(place.scales[(first + r) / kRowsPerBlock]);
        } else {
          scales[r] = kScaleBias;
        }
      }
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r) {
        store_row<kIsWhole>(tile, first + r, words[r], scale_of(scales[r]), squares);
      }
    }
    return thread_.sum(squares);
  }

  template <bool kIsWhole, size_t kBytes>
  HOST_DEVICE_INLINE void store_row(const Tile& tile, uint32_t row, const Words<kBytes>& words,
                                    float scale, double (&squares)[kElemsPerRow]) {
    constexpr size_t kElemBytes = info(dtype).num_bytes;
    constexpr Rounding kToNearest{};
    const uint32_t num_left = kIsWhole ? kElemsPerRow : thread_.num_left(row, tile.num_elems);
    Words<kElemsPerRow * kElemBytes> results{};
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElemsPerRow; ++i) {
      const auto code = get_bits<info(wire).num_bytes>(words, i);
      const float decoded = decode<wire, is_scaled>(block_, code);
      const float value = (is_scaled ? decoded * scale : decoded) * args_.bucket.result_factor;
      const auto bits =
          encode<dtype, false>(block_, static_cast<AccOf<dtype>>(value), kToNearest, 0);
      put_bits<kElemBytes>(results, i, bits);
      // What is measured is what is stored; float64 holds it unchanged.
      const auto stored = static_cast<float>(decode<dtype, false>(block_, bits));
      const double measured = i < num_left ? static_cast<double>(stored) : 0.0;
      squares[i] += measured * measured;
      num_non_finite_ += is_finite(stored) || i >= num_left ? 0 : 1;
    }
    thread_.template write<dtype, kIsWhole>(tile.data, row, results, tile.num_elems);
  }

  // Every block says that its tiles are summed; the last one to say so sees the sums of all.
  HOST_DEVICE void sum_up_in_last_block() const {
    block_.sync();
    bool is_last = true;
    SystemWord<uint32_t> num_blocks_done(*args_.num_blocks_done);
    if (block_.thread() == 0) {
      const auto others = static_cast<uint32_t>(block_.num_blocks()) - 1;
      is_last = num_blocks_done.fetch_add(1, MemoryOrder::acq_rel) == others;
    }
    if (!block_.all(is_last)) return;
    const double sum =
        sum_in_fixed_tree(block_, args_.squares, args_.bucket.num_tiles, block_.shared_doubles());
    if (block_.thread() != 0) return;
    *args_.sum_of_squares = sum;
    num_blocks_done.store(0, MemoryOrder::relaxed);  // for the next launch
  }

  HOST_DEVICE static constexpr WireFormat format() { return {wire, is_scaled}; }

  const Block& block_;
  TileThread<Block> thread_;
  const UnpackArgs& args_;
  uint32_t num_non_finite_ = 0;
};

template <DType dtype, DType wire, bool is_scaled, typename Block>
HOST_DEVICE void unpack(const Block& block, const UnpackArgs& args) {
  Unpacker<dtype, wire, is_scaled, Block>(block, args).run();
}

}  // namespace rota::cuda
