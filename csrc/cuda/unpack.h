// Unpacks the wire format into gradients, a list of tensors in one launch and one pass: unscales
// and stores them, counts non-finite results and sums the squares of what is stored. Gives the same
// bits as the CPU (cpu/bucket_reducer.cpp), also for the norm: squares are summed by tile, tiles by
// group, and groups by the block that ends last, in the fixed tree of base/fixed_tree.h.
#pragma once

#include "base/fixed_tree.h"
#include "cuda/row_conversions.h"
#include "cuda/system_word.h"
#include "cuda/tiles.h"

namespace rota::cuda {

// dtype: of the gradients; wire, is_scaled: what they come from.
template <DType dtype, DType wire, bool is_scaled, typename Block>
class Unpacker {
 public:
  HOST_DEVICE Unpacker(const Block& block, const UnpackArgs& args)
      : block_(block), thread_(block), args_(args) {}

  // A block takes whole groups in turn, and each of its warps parts of them, so the sum of a group
  // needs no other block. Sums of parts wait in shared memory, so that warps need not.
  HOST_DEVICE void run() {
    const auto stride = static_cast<uint64_t>(block_.num_blocks());
    const auto first_group = static_cast<uint64_t>(block_.index());
    uint64_t first_kept = first_group;
    uint32_t num_kept = 0;
    Place here{first_group, thread_.warp()};
    Tile next = tile_at(here);
    Received ahead{};
    if (kLoadsAhead && is_there(here)) ahead = fetch(wire_at(here), 0);
    for (uint64_t group = first_group; group < num_groups(); group += stride) {
      while (here.group == group) {
        const Tile tile = next;
        const Place after = after_this(here, stride);
        next = tile_at(after);
        const double squares = is_there(here) ? unpack_tile(tile, here, after, ahead) : 0;
        const double sum = thread_.sum_of_teams(squares);
        if (thread_.is_first_of_warp()) kept_sums()[num_kept * kParts + here.part] = sum;
        here = after;
      }
      if (++num_kept == kMostKept) {
        store_sums(first_kept, num_kept);
        block_.sync();  // before others take their place
        first_kept = group + stride;
        num_kept = 0;
      }
    }
    store_sums(first_kept, num_kept);
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

  // Each team of a warp has one tile of a part.
  static constexpr uint32_t kParts = kTreeGroup / kTeams;
  struct Place {
    uint64_t group;
    uint32_t part;
  };
  HOST_DEVICE Place after_this(const Place& place, uint64_t stride) const {
    const uint32_t part = place.part + thread_.num_warps();
    return part < kParts ? Place{place.group, part} : Place{place.group + stride, thread_.warp()};
  }
  HOST_DEVICE uint64_t index_of(const Place& place) const {
    return place.group * kTreeGroup + place.part * kTeams + thread_.team();
  }
  HOST_DEVICE bool is_there(const Place& place) const {
    return index_of(place) < args_.bucket.num_tiles;
  }
  HOST_DEVICE Tile tile_at(const Place& place) const {
    return is_there(place) ? args_.bucket.tile(index_of(place), kElemBytes) : Tile{};
  }
  HOST_DEVICE WirePlace wire_at(const Place& place) const {
    return format().from(format().place(args_.bucket.wire, args_.bucket.num_elems()),
                         index_of(place) * kTileElems);
  }

  HOST_DEVICE uint64_t num_groups() const {
    return schedule::ceil_div(args_.bucket.num_tiles, kTreeGroup);
  }

  // Sums of the parts of this block's last groups, in the memory that the last block adds up in.
  static constexpr uint32_t kMostKept = 4;
  static_assert(kMostKept * kParts <= kTreeDoubles);
  HOST_DEVICE double* kept_sums() const { return block_.shared_doubles(); }
  // Makes them the sums of the groups from `first` on.
  HOST_DEVICE void store_sums(uint64_t first, uint32_t num_kept) const {
    block_.sync();
    const auto i = static_cast<uint32_t>(block_.thread());
    if (i >= num_kept) return;
    const uint64_t group = first + i * static_cast<uint64_t>(block_.num_blocks());
    args_.squares[group] = sum_in_pairs<kParts>(kept_sums() + i * kParts);
  }

  HOST_DEVICE_INLINE double unpack_tile(const Tile& tile, const Place& here, const Place& after,
                                        Received& ahead) {
    return tile.is_whole(kElemBytes) ? unpack_rows<true>(tile, here, after, ahead)
                                     : unpack_rows<false>(tile, here, after, ahead);
  }

  // ahead: this tile's first rows; then the next tile's.
  template <bool kIsWhole>
  HOST_DEVICE double unpack_rows(const Tile& tile, const Place& here, const Place& after,
                                 Received& ahead) {
    if (!kLoadsAhead) ahead = fetch(wire_at(here), 0);
    double squares[kElemsPerRow] = {};
    for (uint32_t row = 0; row < kTileRows; row += kRowsInFlight) {
      Received received = ahead;
      // Loads the next rows while these are worked on.
      if (row + kRowsInFlight < kTileRows) {
        ahead = fetch(wire_at(here), row + kRowsInFlight);
      } else if (kLoadsAhead && is_there(after)) {
        ahead = fetch(wire_at(after), 0);
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
    RowPart values[kRowsInFlight];
    decode_rows<wire, is_scaled>(block_, received.rows, values);
    for_each_elem([&](uint32_t r, uint32_t i) {
      float value = values[r].of[i];
      if constexpr (is_scaled) value *= scales[r];
      const auto result = static_cast<AccOf<dtype>>(value * args_.bucket.result_factor);
      put_bits<kElemBytes>(results[r], i, encode<dtype, false>(block_, result, kToNearest, 0));
    });
  }

  // Measures what is stored. The cast to float is exact: a float64 result is a widened float.
  template <bool kIsWhole>
  HOST_DEVICE_INLINE void measure(const RowBits<dtype> (&results)[kRowsInFlight], const Tile& tile,
                                  uint32_t row, double (&squares)[kElemsPerRow]) {
    const auto for_each_stored = [&](const auto& body) {
      for_each_elem([&](uint32_t r, uint32_t i) {
        if (!kIsWhole && i >= thread_.num_left(row + r, tile.num_elems)) return;
        const BitsOf<kElemBytes> bits = get_bits<kElemBytes>(results[r], i);
        body(static_cast<float>(decode<dtype, false>(block_, bits)), i);
      });
    };
    for_each_stored([&](float stored, uint32_t i) {
      squares[i] += static_cast<double>(stored) * static_cast<double>(stored);
    });
    // The squares of finite floats are finite in float64, and their sum is.
    const double sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    if (sum < kInfinity) return;
    for_each_stored([&](float stored, uint32_t) { num_non_finite_ += is_finite(stored) ? 0 : 1; });
  }
  static constexpr double kInfinity = __builtin_inf();

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
