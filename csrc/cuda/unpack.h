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
    uint32_t num_kept = 0;
    uint64_t part = uint64_t{static_cast<uint32_t>(block_.index())} * kParts + thread_.warp();
    Tile next = tile_at(part);
    Received ahead{};
    if (kLoadsAhead && is_there(part)) ahead = fetch(wire_at(part), 0);
    while (part / kParts < num_groups()) {
      const uint64_t group = part / kParts;
      while (part / kParts == group) {
        const Tile tile = next;
        const uint64_t after = part_after(part);
        next = tile_at(after);
        const double squares = is_there(part) ? unpack_tile(tile, part, after, ahead) : 0;
        const double sum = thread_.sum_of_teams(squares);
        if (thread_.is_first_of_warp()) kept_sums()[num_kept * kParts + part % kParts] = sum;
        part = after;
      }
      if (++num_kept == kMostKept) {
        store_sums(part / kParts, num_kept);
        block_.sync();  // before others take their place
        num_kept = 0;
      }
    }
    store_sums(part / kParts, num_kept);
    thread_.add_up(args_.words->num_non_finite, num_non_finite_);
    sum_up_in_last_block();
  }

 private:
  static constexpr size_t kElemBytes = info(dtype).num_bytes;
  static constexpr uint32_t kRowsPerBlock = block_scaling(wire).block_elems / kRowElems;

  // There are no registers for it in float64.
  static constexpr bool kLoadsAhead = kElemBytes < 8;

  // The bits of some rows as loaded; the scale of row r is the byte r / kRowsPerBlock of `scales`.
  struct Received {
    RowBits<wire> rows[kRowsInFlight];
    uint32_t scales;
  };

  // A group is kParts parts, numbered through all groups; each team of a warp has one tile of a
  // part.
  static constexpr uint32_t kParts = kTreeGroup / kTeams;
  HOST_DEVICE uint64_t part_after(uint64_t part) const {
    const auto in_group = static_cast<uint32_t>(part % kParts);
    if (in_group + thread_.num_warps() < kParts) return part + thread_.num_warps();
    return part - in_group + thread_.warp() + group_stride() * kParts;
  }
  HOST_DEVICE uint64_t group_stride() const { return static_cast<uint32_t>(block_.num_blocks()); }
  HOST_DEVICE uint64_t index_in(uint64_t part) const { return part * kTeams + thread_.team(); }
  HOST_DEVICE bool is_there(uint64_t part) const { return index_in(part) < args_.bucket.num_tiles; }
  HOST_DEVICE Tile tile_at(uint64_t part) const {
    return is_there(part) ? args_.bucket.tile(index_in(part), kElemBytes) : Tile{};
  }
  HOST_DEVICE WirePlace wire_at(uint64_t part) const {
    return format().from(format().place(args_.bucket.wire, args_.bucket.num_elems()),
                         index_in(part) * kTileElems);
  }

  HOST_DEVICE uint64_t num_groups() const {
    return schedule::ceil_div(args_.bucket.num_tiles, kTreeGroup);
  }

  // Sums of the parts of this block's last groups, in the memory that the last block adds up in.
  static constexpr uint32_t kMostKept = 4;
  static_assert(kMostKept * kParts <= kTreeDoubles);
  HOST_DEVICE double* kept_sums() const { return block_.shared_doubles(); }
  // Makes them the sums of the block's last groups before group `end`, which would be its next.
  HOST_DEVICE void store_sums(uint64_t end, uint32_t num_kept) const {
    block_.sync();
    if (!thread_.is_first_of_warp()) return;
    for (uint32_t i = thread_.warp(); i < num_kept; i += thread_.num_warps()) {
      args_.squares[end - (num_kept - i) * group_stride()] =
          sum_in_pairs<kParts>(kept_sums() + i * kParts);
    }
  }

  HOST_DEVICE_INLINE double unpack_tile(const Tile& tile, uint64_t part, uint64_t after,
                                        Received& ahead) {
    return tile.is_whole(kElemBytes) ? unpack_rows<true>(tile, part, after, ahead)
                                     : unpack_rows<false>(tile, part, after, ahead);
  }

  // ahead: this tile's first rows; then the next tile's.
  template <bool kIsWhole>
  HOST_DEVICE double unpack_rows(const Tile& tile, uint64_t part, uint64_t after, Received& ahead) {
    if (!kLoadsAhead) ahead = fetch(wire_at(part), 0);
    double squares[kElemsPerRow] = {};
    for (uint32_t row = 0; row < kTileRows; row += kRowsInFlight) {
      Received received = ahead;
      // Loads the next rows while these are worked on.
      if (row + kRowsInFlight < kTileRows) {
        ahead = fetch(wire_at(part), row + kRowsInFlight);
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
    decode_rows<wire, is_scaled>(block_, received.rows, [&](uint32_t r, uint32_t i, float value) {
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
