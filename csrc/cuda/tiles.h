// Gradients on their way to the wire format and back, a tile of 512 elements at a time
// (base/tile.h), each tile worked on by 8 neighbouring threads.
//
// A tile is 16 rows of 32 elements; in each row a thread has 4 neighbouring ones. So scales are
// found among neighbours, and a thread's elements belong to the same four of the 32 partial sums of
// squares, in the order in which the CPU adds them (cpu/wire_loops.inl). Memory is moved 16 bytes
// at a time in every dtype: rows of narrow ones several together.
#pragma once

#include "base/block_scale.h"
#include "base/tile.h"
#include "cuda/bucket_args.h"
#include "cuda/scalar.h"
#include "cuda/words.h"

namespace rota::cuda {

inline constexpr uint32_t kRowElems = 32;
inline constexpr uint32_t kTileRows = kTileElems / kRowElems;
inline constexpr uint32_t kElemsPerRow = kRowElems / kTileThreads;  // of one thread

// So many rows are loaded before the first is used: whole scaled blocks of every wire format.
inline constexpr uint32_t kRowsInFlight = 4;

// A thread's elements of one row.
struct RowPart {
  float of[kElemsPerRow];
};
// The same as bits of a dtype.
template <DType dtype>
using RowBits = Words<kElemsPerRow * info(dtype).num_bytes>;

// body(row, elem) for a thread's elements of the rows in flight, row by row.
template <typename Body>
HOST_DEVICE_INLINE void for_each_elem(const Body& body) {
  ROTA_UNROLL
  for (uint32_t row = 0; row < kRowsInFlight; ++row) {
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElemsPerRow; ++i) body(row, i);
  }
}

HOST_DEVICE_INLINE bool is_finite(float value) {
  return (bit_as<uint32_t>(value) & kMagnitudeMask) < kInfinityBits;
}

// This thread's place in the tile that it works on.
template <typename Block>
class TileThread {
 public:
  HOST_DEVICE explicit TileThread(const Block& block)
      : block_(block), place_(static_cast<uint32_t>(block.thread()) % kTileThreads) {}

  HOST_DEVICE const Block& block() const { return block_; }
  HOST_DEVICE bool is_first() const { return place_ == 0; }

  // The tiles that this thread and its neighbours work on: first, first + stride, ...
  HOST_DEVICE uint64_t first_tile() const {
    return static_cast<uint64_t>(block_.index()) * tiles_per_block() +
           static_cast<uint32_t>(block_.thread()) / kTileThreads;
  }
  HOST_DEVICE uint64_t tile_stride() const {
    return static_cast<uint64_t>(block_.num_blocks()) * tiles_per_block();
  }

  // The first of this thread's elements of a row, counted from the start of the tile.
  HOST_DEVICE uint32_t elem(uint32_t row) const { return row * kRowElems + place_ * kElemsPerRow; }

  // This thread's elements of neighbouring rows, as bits. num_elems: of the tile. kIsWhole: all are
  // there, and the tile is aligned; else what is not there reads as 0.
  template <DType dtype, bool kIsWhole = true>
  HOST_DEVICE_INLINE void read(const std::byte* tile, uint32_t row,
                               RowBits<dtype> (&rows)[kRowsInFlight],
                               uint64_t num_elems = kTileElems) const {
    constexpr uint32_t kTogether = rows_together(dtype);
    ROTA_UNROLL
    for (uint32_t first = 0; first < kRowsInFlight; first += kTogether) {
      if constexpr (kIsWhole) {
        const auto words = block_.template load<kTogether * sizeof(rows[0])>(
            tile + wide_offset<dtype>(row + first));
        ROTA_UNROLL
        for (uint32_t r = 0; r < kTogether; ++r)
          rows[first + r] = part_of<sizeof(rows[0])>(words, r);
        exchange<kTogether>(rows, first);
      } else {
        ROTA_UNROLL
        for (uint32_t r = first; r < first + kTogether; ++r) {
          rows[r] = load_part<info(dtype).num_bytes, sizeof(rows[0])>(
              tile + elem(row + r) * info(dtype).num_bytes, num_left(row + r, num_elems));
        }
      }
    }
  }
  template <DType dtype, bool kIsWhole = true>
  HOST_DEVICE_INLINE void write(std::byte* tile, uint32_t row,
                                RowBits<dtype> (&rows)[kRowsInFlight],
                                uint64_t num_elems = kTileElems) const {
    constexpr uint32_t kTogether = rows_together(dtype);
    ROTA_UNROLL
    for (uint32_t first = 0; first < kRowsInFlight; first += kTogether) {
      if constexpr (kIsWhole) {
        exchange<kTogether>(rows, first);
        Words<kTogether * sizeof(rows[0])> words;
        ROTA_UNROLL
        for (uint32_t r = 0; r < kTogether; ++r) put_part(words, r, rows[first + r]);
        block_.store(tile + wide_offset<dtype>(row + first), words);
      } else {
        ROTA_UNROLL
        for (uint32_t r = first; r < first + kTogether; ++r) {
          store_part<info(dtype).num_bytes>(tile + elem(row + r) * info(dtype).num_bytes,
                                            num_left(row + r, num_elems), rows[r]);
        }
      }
    }
  }
  // How many of them are there.
  HOST_DEVICE_INLINE uint32_t num_left(uint32_t row, uint64_t num_elems) const {
    if (elem(row) >= num_elems) return 0;
    const uint64_t left = num_elems - elem(row);
    return left < kElemsPerRow ? static_cast<uint32_t>(left) : kElemsPerRow;
  }

  // The largest value of a row's threads, whose number they share a scale with.
  HOST_DEVICE uint32_t largest(uint32_t value) const {
    return block_.template largest_of_lanes<kTileThreads>(value);
  }
  // The sum over the tile of 32 partial sums, of which each thread has four: upper half to lower
  // half. Every thread gets it.
  HOST_DEVICE double sum(const double (&partials)[kElemsPerRow]) const {
    double sums[kElemsPerRow];
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElemsPerRow; ++i) sums[i] = partials[i];
    ROTA_UNROLL
    for (uint32_t distance = kTileThreads / 2; distance > 0; distance /= 2) {
      ROTA_UNROLL
      for (uint32_t i = 0; i < kElemsPerRow; ++i) {
        sums[i] += block_.template from_lane<kTileThreads>(sums[i], distance);
      }
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }

 private:
  // So many rows of a narrow dtype make 16 bytes for each thread. They are moved together: each of
  // as many neighbours moves 16 bytes of one row, and then they exchange what is the others'.
  HOST_DEVICE static constexpr uint32_t rows_together(DType dtype) {
    const size_t row_bytes = kElemsPerRow * info(dtype).num_bytes;
    return row_bytes < kAccessBytes ? kAccessBytes / row_bytes : 1;
  }
  // Where this thread's 16 bytes lie, of the rows from `row` on.
  template <DType dtype>
  HOST_DEVICE_INLINE size_t wide_offset(uint32_t row) const {
    constexpr uint32_t kTogether = rows_together(dtype);
    const uint32_t own_row = row + place_ % kTogether;
    const uint32_t column = place_ / kTogether * kTogether * kElemsPerRow;
    return size_t{own_row * kRowElems + column} * info(dtype).num_bytes;
  }
  // Thread i's part r becomes thread r's part i, among kTogether neighbours: a transposition, which
  // undoes itself.
  template <uint32_t kTogether, typename Part>
  HOST_DEVICE_INLINE void exchange(Part (&parts)[kRowsInFlight], uint32_t first) const {
    ROTA_UNROLL
    for (uint32_t distance = 1; distance < kTogether; distance *= 2) {
      const bool is_upper = (place_ & distance) != 0;
      ROTA_UNROLL
      for (uint32_t r = 0; r < kTogether; ++r) {
        if ((r & distance) != 0) continue;
        Part& low = parts[first + r];
        Part& high = parts[first + (r | distance)];
        ROTA_UNROLL
        for (size_t w = 0; w < sizeof(Part) / sizeof(uint32_t); ++w) {
          const uint32_t sent = is_upper ? low.words[w] : high.words[w];
          const uint32_t got = block_.template from_lane<kTileThreads>(sent, distance);
          low.words[w] = is_upper ? got : low.words[w];
          high.words[w] = is_upper ? high.words[w] : got;
        }
      }
    }
  }

  HOST_DEVICE uint64_t tiles_per_block() const {
    return static_cast<uint32_t>(block_.num_threads()) / kTileThreads;
  }

  const Block& block_;
  uint32_t place_;
};

}  // namespace rota::cuda
