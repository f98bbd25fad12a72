// How pack and unpack read and write gradients, a tile of 512 elements at a time (base/tile.h).
//
// A tile is 16 rows of 32 elements. A team of 8 neighbouring threads works on 4 rows at a time,
// with 4 neighbouring elements of each row per thread. So scales are found within a team, and a
// thread's elements always belong to the same 4 of the 32 partial sums of squares. Memory is moved
// 16 bytes at a time in every dtype; in narrow dtypes several rows are moved together. Gradients of
// 4 bytes need not be aligned to 16: a thread then moves the aligned 16 bytes in which its elements
// begin, and gets the rest from its neighbour, or gives it to that one.
//
// A warp is four teams. pack gives each team a quarter of one tile, because nothing spans more than
// 4 rows. unpack gives each team one of four neighbouring tiles, with the rows in ascending order,
// as the CPU adds their squares (cpu/wire_loops.inl).
#pragma once

#include "base/block_scale.h"
#include "base/fixed_tree.h"
#include "base/tile.h"
#include "cuda/bucket_args.h"
#include "cuda/scalar.h"
#include "cuda/system_word.h"
#include "cuda/words.h"

namespace rota::cuda {

inline constexpr uint32_t kRowElems = 32;
inline constexpr uint32_t kTileRows = kTileElems / kRowElems;
inline constexpr uint32_t kElemsPerRow = kRowElems / kTeamThreads;  // of one thread

// Rows that are loaded before the first is used; they are whole scaled blocks in every wire format.
inline constexpr uint32_t kRowsInFlight = 4;
static_assert(kTileRows == kTeams * kRowsInFlight, "the teams of a warp share a tile");
static_assert(kTreeGroup % kTeams == 0, "or have some of a group");

// A thread's elements of one row.
struct RowPart {
  float of[kElemsPerRow];
};
// The same as bits of a dtype.
template <DType dtype>
using RowBits = Words<kElemsPerRow * info(dtype).num_bytes>;
// What a thread has loaded of gradients; sort_gradients() makes them its own elements.
template <DType dtype>
struct Gradients {
  RowBits<dtype> rows[kRowsInFlight];
  RowBits<dtype> rest;  // of the team's last thread, where they are not aligned
};

// Calls body(row, elem) for a thread's elements of the rows in flight, row by row.
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

// This thread's place in its team, and the team's in its warp.
template <typename Block>
class TileThread {
 public:
  HOST_DEVICE explicit TileThread(const Block& block)
      : block_(block), lane_(static_cast<uint32_t>(block.thread()) % kWarpThreads) {}

  HOST_DEVICE const Block& block() const { return block_; }
  HOST_DEVICE uint32_t team() const { return lane_ / kTeamThreads; }
  HOST_DEVICE bool is_first_of_team() const { return place() == 0; }
  HOST_DEVICE bool is_first_of_warp() const { return lane_ == 0; }

  // Which warp of its block this is, and how many there are.
  HOST_DEVICE uint32_t warp() const {
    return static_cast<uint32_t>(block_.thread()) / kWarpThreads;
  }
  HOST_DEVICE uint32_t num_warps() const {
    return static_cast<uint32_t>(block_.num_threads()) / kWarpThreads;
  }

  // The items that this warp takes when all warps of the launch take turns: first, first + stride,
  // ...
  HOST_DEVICE uint64_t first_item() const {
    return static_cast<uint64_t>(block_.index()) * num_warps() + warp();
  }
  HOST_DEVICE uint64_t item_stride() const {
    return static_cast<uint64_t>(block_.num_blocks()) * num_warps();
  }

  // The first of this thread's elements of a row, counted from the start of the tile.
  HOST_DEVICE uint32_t elem(uint32_t row) const { return row * kRowElems + place() * kElemsPerRow; }

  // Reads this thread's elements of neighbouring rows, as bits. num_elems: of the tile. kIsWhole:
  // the tile is aligned and has all its elements; otherwise missing elements read as 0.
  template <DType dtype, bool kIsWhole = true>
  HOST_DEVICE_INLINE void read(const std::byte* tile, uint32_t row,
                               RowBits<dtype> (&rows)[kRowsInFlight],
                               uint64_t num_elems = kTileElems) const {
    if constexpr (kIsWhole) {
      fetch<dtype>(tile, row, rows);
      sort<dtype>(rows);
    } else {
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r) {
        const std::byte* src = tile + elem(row + r) * info(dtype).num_bytes;
        const uint32_t num_there = num_left(row + r, num_elems);
        if (is_one_access<dtype>(src, num_there)) {
          rows[r] = block_.template load<sizeof(rows[r])>(src);
        } else {
          rows[r] = load_part<info(dtype).num_bytes, sizeof(rows[r])>(src, num_there);
        }
      }
    }
  }
  // The two halves of reading a whole tile. Between them, while the loads are in flight, the bits
  // of narrow dtypes may be a neighbour's.
  template <DType dtype>
  HOST_DEVICE_INLINE void fetch(const std::byte* tile, uint32_t row,
                                RowBits<dtype> (&rows)[kRowsInFlight]) const {
    constexpr uint32_t kTogether = rows_together(dtype);
    ROTA_UNROLL
    for (uint32_t first = 0; first < kRowsInFlight; first += kTogether) {
      const auto words =
          block_.template load<kTogether * sizeof(rows[0])>(tile + wide_offset<dtype>(row + first));
      ROTA_UNROLL
      for (uint32_t r = 0; r < kTogether; ++r) rows[first + r] = part_of<sizeof(rows[0])>(words, r);
    }
  }
  template <DType dtype>
  HOST_DEVICE_INLINE void sort(RowBits<dtype> (&rows)[kRowsInFlight]) const {
    constexpr uint32_t kTogether = rows_together(dtype);
    ROTA_UNROLL
    for (uint32_t first = 0; first < kRowsInFlight; first += kTogether) {
      transpose<kTogether>(rows, first);
    }
  }
  template <DType dtype, bool kIsWhole = true>
  HOST_DEVICE_INLINE void write(std::byte* tile, uint32_t row,
                                RowBits<dtype> (&rows)[kRowsInFlight],
                                uint64_t num_elems = kTileElems) const {
    if constexpr (kIsWhole) {
      constexpr uint32_t kTogether = rows_together(dtype);
      sort<dtype>(rows);
      ROTA_UNROLL
      for (uint32_t first = 0; first < kRowsInFlight; first += kTogether) {
        Words<kTogether * sizeof(rows[0])> words;
        ROTA_UNROLL
        for (uint32_t r = 0; r < kTogether; ++r) put_part(words, r, rows[first + r]);
        block_.store(tile + wide_offset<dtype>(row + first), words);
      }
    } else {
      ROTA_UNROLL
      for (uint32_t r = 0; r < kRowsInFlight; ++r) {
        std::byte* dst = tile + elem(row + r) * info(dtype).num_bytes;
        const uint32_t num_there = num_left(row + r, num_elems);
        if (is_one_access<dtype>(dst, num_there)) {
          block_.store(dst, rows[r]);
        } else {
          store_part<info(dtype).num_bytes>(dst, num_there, rows[r]);
        }
      }
    }
  }
  // The same for the gradients of a tile that is whole, aligned or not.
  template <DType dtype>
  HOST_DEVICE_INLINE void request_gradients(const std::byte* tile, uint32_t row,
                                            Gradients<dtype>& gradients) const {
    if constexpr (kMayBeSkewed<dtype>) {
      const uint32_t skew = skew_of(tile);
      if (skew != 0) return fetch_skewed(tile, row, skew, gradients);
    }
    fetch<dtype>(tile, row, gradients.rows);
  }
  template <DType dtype>
  HOST_DEVICE_INLINE void sort_gradients(const std::byte* tile, Gradients<dtype>& gradients) const {
    sort<dtype>(gradients.rows);
    if constexpr (kMayBeSkewed<dtype>) {
      const uint32_t skew = skew_of(tile);
      if (skew != 0) sort_skewed(skew, gradients);
    }
  }
  template <DType dtype>
  HOST_DEVICE_INLINE void write_gradients(std::byte* tile, uint32_t row,
                                          RowBits<dtype> (&rows)[kRowsInFlight]) const {
    if constexpr (kMayBeSkewed<dtype>) {
      const uint32_t skew = skew_of(tile);
      if (skew != 0) return write_skewed(tile, row, skew, rows);
    }
    write<dtype>(tile, row, rows);
  }
  // How many of this thread's elements of a row exist.
  HOST_DEVICE_INLINE uint32_t num_left(uint32_t row, uint64_t num_elems) const {
    if (elem(row) >= num_elems) return 0;
    const uint64_t left = num_elems - elem(row);
    return left < kElemsPerRow ? static_cast<uint32_t>(left) : kElemsPerRow;
  }

  // The largest value among the team's threads, whose numbers share a scale.
  HOST_DEVICE uint32_t largest_of_team(uint32_t value) const {
    return block_.template largest_of_lanes<kTeamThreads>(value);
  }
  // Sums the 32 partial sums of the team, four per thread, by adding the upper half to the lower
  // half. Every thread gets the sum.
  HOST_DEVICE double sum_of_team(const double (&partials)[kElemsPerRow]) const {
    double sums[kElemsPerRow];
    ROTA_UNROLL
    for (uint32_t i = 0; i < kElemsPerRow; ++i) sums[i] = partials[i];
    ROTA_UNROLL
    for (uint32_t distance = kTeamThreads / 2; distance > 0; distance /= 2) {
      ROTA_UNROLL
      for (uint32_t i = 0; i < kElemsPerRow; ++i) {
        sums[i] += block_.template from_lane<kTeamThreads>(sums[i], distance);
      }
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }
  // Sums one value per team, as base/fixed_tree.h adds tiles. The whole warp calls this, and every
  // thread gets the sum.
  HOST_DEVICE double sum_of_teams(double value) const {
    ROTA_UNROLL
    for (uint32_t distance = kTeamThreads; distance < kWarpThreads; distance *= 2) {
      value += block_.template from_lane<kWarpThreads>(value, distance);
    }
    return value;
  }
  // Adds the counts of the warp's threads to `total`. The whole warp calls this.
  HOST_DEVICE void add_up(uint64_t& total, uint32_t count) const {
    ROTA_UNROLL
    for (uint32_t distance = 1; distance < kWarpThreads; distance *= 2) {
      count += block_.template from_lane<kWarpThreads>(count, distance);
    }
    if (is_first_of_warp() && count != 0) add_to_count(total, count);
  }

 private:
  // How many rows of a narrow dtype make 16 bytes for each thread. They are moved together: that
  // many neighbouring threads each move 16 bytes of one row, then exchange the parts that belong to
  // each other.
  HOST_DEVICE static constexpr uint32_t rows_together(DType dtype) {
    const size_t row_bytes = kElemsPerRow * info(dtype).num_bytes;
    return row_bytes < kAccessBytes ? kAccessBytes / row_bytes : 1;
  }
  // The offset of this thread's 16 bytes, in the rows from `row` on.
  template <DType dtype>
  HOST_DEVICE_INLINE size_t wide_offset(uint32_t row) const {
    constexpr uint32_t kTogether = rows_together(dtype);
    const uint32_t own_row = row + place() % kTogether;
    const uint32_t column = place() / kTogether * kTogether * kElemsPerRow;
    return size_t{own_row * kRowElems + column} * info(dtype).num_bytes;
  }
  // Whether a thread's part of a row, in a short or misaligned tile, exists in full and is aligned.
  template <DType dtype>
  HOST_DEVICE static bool is_one_access(const std::byte* part, uint32_t num_there) {
    return num_there == kElemsPerRow && is_aligned(part, alignof(RowBits<dtype>));
  }
  // Among kTogether neighbouring threads, thread i's part r becomes thread r's part i: a
  // transposition, which is its own inverse.
  template <uint32_t kTogether, typename Part>
  HOST_DEVICE_INLINE void transpose(Part (&parts)[kRowsInFlight], uint32_t first) const {
    ROTA_UNROLL
    for (uint32_t distance = 1; distance < kTogether; distance *= 2) {
      const bool is_upper = (lane_ & distance) != 0;
      ROTA_UNROLL
      for (uint32_t r = 0; r < kTogether; ++r) {
        if ((r & distance) != 0) continue;
        Part& low = parts[first + r];
        Part& high = parts[first + (r | distance)];
        ROTA_UNROLL
        for (size_t w = 0; w < sizeof(Part) / sizeof(uint32_t); ++w) {
          const uint32_t sent = is_upper ? low.words[w] : high.words[w];
          const uint32_t got = block_.template from_lane<kTeamThreads>(sent, distance);
          low.words[w] = is_upper ? got : low.words[w];
          high.words[w] = is_upper ? high.words[w] : got;
        }
      }
    }
  }

  // ---- rows of 4-byte elements that begin `skew` elements behind a multiple of 16 bytes

  template <DType dtype>
  static constexpr bool kMayBeSkewed = info(dtype).num_bytes == 4;
  using FourWords = Words<kAccessBytes>;
  static constexpr size_t kRowBytes = kRowElems * sizeof(uint32_t);

  HOST_DEVICE static uint32_t skew_of(const std::byte* tile) {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tile) % kAccessBytes /
                                 sizeof(uint32_t));
  }
  // The aligned 16 bytes that this thread moves of a row; the team's first thread moves only those
  // behind the skew, and its last one also those in front of it that follow the last row.
  HOST_DEVICE ptrdiff_t skewed_offset(uint32_t row, uint32_t skew) const {
    return (static_cast<ptrdiff_t>(elem(row)) - skew) * static_cast<ptrdiff_t>(sizeof(uint32_t));
  }
  HOST_DEVICE bool is_last_of_team() const { return place() == kTeamThreads - 1; }

  template <DType dtype>
  HOST_DEVICE_INLINE void fetch_skewed(const std::byte* tile, uint32_t row, uint32_t skew,
                                       Gradients<dtype>& gradients) const {
    const std::byte* src = tile + skewed_offset(row, skew);
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) {
      FourWords& part = gradients.rows[r];
      if (r == 0 && is_first_of_team()) {
        ROTA_UNROLL
        for (uint32_t w = 0; w < kElemsPerRow; ++w) {
          part.words[w] = w >= skew ? reinterpret_cast<const uint32_t*>(src)[w] : 0;
        }
      } else {
        part = block_.template load<kAccessBytes>(src + r * kRowBytes);
      }
    }
    if (!is_last_of_team()) return;
    src += (kRowsInFlight - 1) * kRowBytes + kAccessBytes;
    gradients.rest = load_part<sizeof(uint32_t), kAccessBytes>(src, skew);
  }
  // A thread's elements are the end of what it has loaded and the start of what the next one has.
  template <DType dtype>
  HOST_DEVICE_INLINE void sort_skewed(uint32_t skew, Gradients<dtype>& gradients) const {
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) {
      FourWords& part = gradients.rows[r];
      // The next one of a row's last thread is the next row's first.
      const bool gives_next_row = r + 1 < kRowsInFlight && is_first_of_team();
      const FourWords sent = either(gives_next_row, gradients.rows[(r + 1) % kRowsInFlight], part);
      FourWords next = of_neighbour(sent, 1);
      if (r + 1 == kRowsInFlight) next = either(is_last_of_team(), gradients.rest, next);
      part = words_from(part, next, skew);
    }
  }
  HOST_DEVICE_INLINE void write_skewed(std::byte* tile, uint32_t row, uint32_t skew,
                                       const FourWords (&rows)[kRowsInFlight]) const {
    std::byte* dst = tile + skewed_offset(row, skew);
    ROTA_UNROLL
    for (uint32_t r = 0; r < kRowsInFlight; ++r) {
      const bool gives_last_row = r > 0 && is_last_of_team();
      const FourWords sent =
          either(gives_last_row, rows[(r + kRowsInFlight - 1) % kRowsInFlight], rows[r]);
      const FourWords stored =
          words_from(of_neighbour(sent, kTeamThreads - 1), rows[r], kElemsPerRow - skew);
      if (r == 0 && is_first_of_team()) {
        ROTA_UNROLL
        for (uint32_t w = 0; w < kElemsPerRow; ++w) {
          if (w >= skew) reinterpret_cast<uint32_t*>(dst)[w] = stored.words[w];
        }
      } else {
        block_.store(dst + r * kRowBytes, stored);
      }
    }
    if (!is_last_of_team()) return;
    dst += (kRowsInFlight - 1) * kRowBytes + kAccessBytes;
    const FourWords rest = words_from(rows[kRowsInFlight - 1], {}, kElemsPerRow - skew);
    store_part<sizeof(uint32_t)>(dst, skew, rest);
  }
  // Word by word, because registers have no address.
  HOST_DEVICE_INLINE static FourWords either(bool is_first, const FourWords& first,
                                             const FourWords& second) {
    FourWords chosen;
    ROTA_UNROLL
    for (uint32_t w = 0; w < kElemsPerRow; ++w) {
      chosen.words[w] = is_first ? first.words[w] : second.words[w];
    }
    return chosen;
  }
  // What the thread has that comes `distance` after this one, in the circle of the team.
  HOST_DEVICE_INLINE FourWords of_neighbour(const FourWords& sent, uint32_t distance) const {
    FourWords got;
    ROTA_UNROLL
    for (uint32_t w = 0; w < kElemsPerRow; ++w) {
      got.words[w] = block_.template from_place<kTeamThreads>(sent.words[w],
                                                              (place() + distance) % kTeamThreads);
    }
    return got;
  }
  // The four words from `first` on, of eight; first: 1 to 3.
  HOST_DEVICE_INLINE static FourWords words_from(const FourWords& low, const FourWords& high,
                                                 uint32_t first) {
    uint32_t words[2 * kElemsPerRow - 1];
    ROTA_UNROLL
    for (uint32_t w = 0; w < kElemsPerRow; ++w) {
      words[w] = low.words[w];
      if (w + 1 < kElemsPerRow) words[kElemsPerRow + w] = high.words[w];
    }
    // By one and by two, because registers have no index.
    ROTA_UNROLL
    for (uint32_t w = 0; w + 1 < 2 * kElemsPerRow - 1; ++w) {
      words[w] = (first & 1) != 0 ? words[w + 1] : words[w];
    }
    FourWords found;
    ROTA_UNROLL
    for (uint32_t w = 0; w < kElemsPerRow; ++w) {
      found.words[w] = (first & 2) != 0 ? words[w + 2] : words[w];
    }
    return found;
  }

  HOST_DEVICE uint32_t place() const { return lane_ % kTeamThreads; }

  const Block& block_;
  uint32_t lane_;
};

}  // namespace rota::cuda
