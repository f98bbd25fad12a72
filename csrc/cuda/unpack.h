// Unpacks the wire format into gradients, a list of tensors in one launch and one pass: unscales
// and stores them, counts non-finite results and sums the squares of what is stored. Gives the same
// bits as the CPU (cpu/bucket_reducer.cpp), also for the norm: squares are summed by tile, tiles by
// group, and groups by the block that ends last, in the fixed tree of base/fixed_tree.h.
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
    const uint64_t stride = thread_.item_stride();
    uint64_t group = thread_.first_item();
    uint64_t index = group * kTreeGroup + thread_.team();
    Tile next = tile_at(index);
    Received ahead{};
    if (kLoadsAhead && is_there(index)) ahead = fetch(place_of(index), 0);
    for (; group < num_groups(); group += stride) {
      const Tile tile = next;
      const uint64_t next_index = index + stride * kTreeGroup;
      next = tile_at(next_index);
      const double squares = is_there(index) ? unpack_tile(tile, index, next_index, ahead) : 0;
      const double sum = thread_.sum_of_teams(squares);
      if (thread_.is_first_of_warp()) args_.squares[group] = sum;
      index = next_index;
    }
    thread_.add_up(args_.words->num_non_finite, num_non_finite_);
    sum_up_in_last_block();
  }

 private:
  static constexpr size_t kElemBytes = info(dtype).num_bytes;
  static constexpr uint32_t kRowsPerBlock = block_scaling(wire).block_elems / kRowElems;

  // There are no registers for it in float64 from float32.
  static constexpr bool kLoadsAhead = kElemBytes + info(wire).num_bytes < 12;

  // The bits of some rows as loaded; the scale of row r is the byte r / kRowsPerBlock of `scales`.
  struct Received {
    RowBits<wire> rows[kRowsInFlight];
    uint32_t scales;
  };

  HOST_DEVICE uint64_t num_groups() const {
    return schedule::ceil_div(args_.bucket.num_tiles, kTreeGroup);
  }

  HOST_DEVICE bool is_there(uint64_t index) const { return index < args_.bucket.num_tiles; }
  HOST_DEVICE Tile tile_at(uint64_t index) const {
    return is_there(index) ? args_.bucket.tile(index, kElemBytes) : Tile{};
  }
  HOST_DEVICE WirePlace place_of(uint64_t index) const {
    return format().from(format().place(args_.bucket.wire, args_.bucket.num_elems()),
                         index * kTileElems);
  }

  HOST_DEVICE_INLINE double unpack_tile(const Tile& tile, uint64_t index, uint64_t next_index,
                                        Received& ahead) {
    return tile.is_whole(kElemBytes) ? unpack_rows<true>(tile, index, next_index, ahead)
                                     : unpack_rows<false>(tile, index, next_index, ahead);
  }

  // ahead: this tile's first rows; then the next tile's.
  template <bool kIsWhole>
  HOST_DEVICE double unpack_rows(const Tile& tile, uint64_t index, uint64_t next_index,
                                 Received& ahead) {
    if (!kLoadsAhead) ahead = fetch(place_of(index), 0);
    double squares[kElemsPerRow] = {};
    for (uint32_t row = 0; row < kTileRows; row += kRowsInFlight) {
      Received received = ahead;
      // Loads the next rows while these are worked on.
      if (row + kRowsInFlight < kTileRows) {
        ahead = fetch(place_of(index), row + kRowsInFlight);
      } else if (kLoadsAhead && is_there(next_index)) {
        ahead = fetch(place_of(next_index), 0);
      }
      RowBits<dtype> results[kRowsInFlight];
      thread_.template sort<wire>(received.rows);
      round_rows(received, results);
      measure<kIsWhole>(results, tile, row, squares);
      if constexpr (kIsWhole) {
        thread_.template write_gradients<dtype>(tile.data, row, results);
      } else {
        thread_.template write<dtype, false>(tile.data, row, results, tile.num_elems);
      }
    }
    return thread_.sum_of_team(squares);
  }

  HOST_DEVICE_INLINE Received fetch(const WirePlace& place, uint32_t row) const {
    Received received;
    thread_.template fetch<wire>(place.payload, row, received.rows);
    if constexpr (is_scaled) {
      // A tile's scales start at a multiple of 8 bytes; those of these rows fill half a word, or
      // one.
      const uint32_t first = row / kRowsPerBlock;
      const auto word = block_.template load<4>(place.scales + first / 4 * 4);
      received.scales = word.words[0] >> first % 4 * 8;
    }
    return received;
  }

  HOST_DEVICE_INLINE void round_rows(const Received& received,
                                     RowBits<dtype> (&results)[kRowsInFlight]) const {
    constexpr Rounding kToNearest{};
    float scales[kRowsInFlight];
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) {
      results[r] = {};
      if constexpr (is_scaled) {
        scales[r] = scale_of(received.scales >> r / kRowsPerBlock * 8 & 0xff);
      }
    }
    for_each_elem([&](uint32_t r, uint32_t i) {
      float value =
          decode<wire, is_scaled>(block_, get_bits<info(wire).num_bytes>(received.rows[r], i));
      if constexpr (is_scaled) value *= scales[r];
      const auto result = static_cast<AccOf<dtype>>(value * args_.bucket.result_factor);
      put_bits<kElemBytes>(results[r], i, encode<dtype, false>(block_, result, kToNearest, 0));
    });
  }

  // Measures what is stored. The cast to float is exact: a float64 result is a widened float.
  template <bool kIsWhole>
  HOST_DEVICE_INLINE void measure(const RowBits<dtype> (&results)[kRowsInFlight], const Tile& tile,
                                  uint32_t row, double (&squares)[kElemsPerRow]) {
    for_each_elem([&](uint32_t r, uint32_t i) {
      if (!kIsWhole && i >= thread_.num_left(row + r, tile.num_elems)) return;
      const auto stored =
          static_cast<float>(decode<dtype, false>(block_, get_bits<kElemBytes>(results[r], i)));
      squares[i] += static_cast<double>(stored) * static_cast<double>(stored);
      num_non_finite_ += is_finite(stored) ? 0 : 1;
    });
  }

  // Every block reports that its tiles are summed and counted; the last one to report sees the sums
  // and the count of all.
  HOST_DEVICE void sum_up_in_last_block() const {
    UnpackWords& words = *args_.words;
    block_.sync();
    bool is_last = true;
    if (block_.thread() == 0) {
      const auto others = static_cast<uint32_t>(block_.num_blocks()) - 1;
      is_last =
          GpuWord<uint32_t>(words.num_blocks_done).fetch_add(1, MemoryOrder::acq_rel) == others;
    }
    if (!block_.all(is_last)) return;
    const double sum =
        sum_in_fixed_tree(block_, args_.squares, num_groups(), block_.shared_doubles());
    if (block_.thread() != 0) return;
    const GpuWord<uint64_t> num_non_finite(words.num_non_finite);
    args_.stats[0] = static_cast<double>(num_non_finite.load(MemoryOrder::relaxed));
    args_.stats[1] = sum;
    words.put_to_rest();  // the next unpack may run without a pack before it
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
