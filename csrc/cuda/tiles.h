// Gradients on their way to the wire format and back, a tile of 512 elements at a time
// (base/tile.h), each tile worked on by 8 neighbouring threads.
//
// A tile is 16 rows of 32 elements; in each row a thread has 4 neighbouring ones. So the threads of
// a tile read and write whole lines in every dtype, float32 with 16 bytes each; scales are found
// among neighbours; and a thread's elements belong to the same four of the 32 partial sums of
// squares, in the order in which the CPU adds them (cpu/wire_loops.inl).
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

// So many rows of a dtype are loaded before the first is used: whole scaled blocks of every wire
// format, and what the registers take.
HOST_DEVICE constexpr uint32_t rows_in_flight(DType dtype) {
  return info(dtype).num_bytes == 8 ? 2 : 4;
}

// A thread's elements of one row.
struct RowPart {
  float of[kElemsPerRow];
};

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

  // This thread's elements of a row, as bits; num_elems: of the tile. kIsWhole: all are there, and
  // the tile is aligned; else what is not there reads as 0.
  template <DType dtype, bool kIsWhole = true>
  HOST_DEVICE_INLINE auto read(const std::byte* tile, uint32_t row,
                               uint64_t num_elems = kTileElems) const {
    constexpr size_t kElemBytes = info(dtype).num_bytes;
    constexpr size_t kBytes = kElemsPerRow * kElemBytes;
    const std::byte* src = tile + elem(row) * kElemBytes;
    if constexpr (kIsWhole) {
      return block_.template load<kBytes>(src);
    } else {
      return load_part<kElemBytes, kBytes>(src, num_left(row, num_elems));
    }
  }
  template <DType dtype, bool kIsWhole = true, size_t kBytes>
  HOST_DEVICE_INLINE void write(std::byte* tile, uint32_t row, const Words<kBytes>& words,
                                uint64_t num_elems = kTileElems) const {
    constexpr size_t kElemBytes = info(dtype).num_bytes;
    static_assert(kBytes == kElemsPerRow * kElemBytes);
    std::byte* dst = tile + elem(row) * kElemBytes;
    if constexpr (kIsWhole) {
      block_.store(dst, words);
    } else {
      store_part<kElemBytes>(dst, num_left(row, num_elems), words);
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
  HOST_DEVICE uint64_t tiles_per_block() const {
    return static_cast<uint32_t>(block_.num_threads()) / kTileThreads;
  }

  const Block& block_;
  uint32_t place_;
};

}  // namespace rota::cuda
