// Sums float64 numbers, one per tile (base/tile.h), in an order that depends only on how many there
// are. The CPU uses one thread and a GPU one block of threads; both get the same bits.
//
//   1. Groups of kTreeGroup tiles: neighbours are added in pairs, then their sums in pairs, and so
//      on. Missing tiles count as 0.
//   2. Group i is added to bin i % kTreeBins, in ascending order.
//   3. Bins are added as the tiles of a group.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace rota {

// On a GPU, the number of tiles that a block works on at a time. The last block of a launch adds
// the groups' sums while all others have ended, so fewer groups cost less time.
inline constexpr uint32_t kTreeGroup = 16;
inline constexpr uint32_t kTreeBins = 512;

// Neighbouring bins that one thread sums; it loads them together, 16 bytes at a time.
inline constexpr uint32_t kBinsOfThread = 4;
// Loads in flight per thread, to hide memory latency. More would need more registers than the rest
// of unpack.
inline constexpr uint32_t kLoadsInFlight = 4;
// Sums that each thread adds in the second-to-last step. Two steps need two barriers; one step per
// level of the tree would need seven.
inline constexpr uint32_t kSumsTogether = 8;
inline constexpr uint32_t kNumThreadSums = kTreeBins / kBinsOfThread;
inline constexpr uint32_t kNumLastSums = kNumThreadSums / kSumsTogether;
// Size of the block's shared memory, in doubles.
inline constexpr uint32_t kTreeDoubles = kNumThreadSums + kNumLastSums;

// Sums neighbours in pairs, as in steps 1 and 3.
template <uint32_t kNumValues>
HOST_DEVICE_INLINE double sum_in_pairs(const double* values) {
  if constexpr (kNumValues == 1) {
    return values[0];
  } else {
    return sum_in_pairs<kNumValues / 2>(values) +
           sum_in_pairs<kNumValues / 2>(values + kNumValues / 2);
  }
}

// Step 2 for the kBinsOfThread bins from `first` on, and the first levels of step 3.
HOST_DEVICE_INLINE double sum_of_bins(const double* groups, uint64_t num_groups, uint32_t first) {
  double bins[kBinsOfThread] = {};
  const uint64_t end_of_whole = num_groups / kBinsOfThread * kBinsOfThread;
  ROTA_NO_UNROLL
  for (uint64_t i = first; i < end_of_whole; i += kLoadsInFlight * kTreeBins) {
    double loaded[kLoadsInFlight][kBinsOfThread] = {};  // adding 0 does not change a sum of squares
    for (uint32_t load = 0; load < kLoadsInFlight; ++load) {
      if (i + load * kTreeBins >= end_of_whole) continue;
      const double* src = groups + i + load * kTreeBins;
      src = static_cast<const double*>(__builtin_assume_aligned(src, 16));
      for (uint32_t bin = 0; bin < kBinsOfThread; ++bin) loaded[load][bin] = src[bin];
    }
    for (const auto& values : loaded) {
      for (uint32_t bin = 0; bin < kBinsOfThread; ++bin) bins[bin] += values[bin];
    }
  }
  if (end_of_whole % kTreeBins == first) {
    for (uint32_t bin = 0; bin < num_groups % kBinsOfThread; ++bin) {
      bins[bin] += groups[end_of_whole + bin];
    }
  }
  return sum_in_pairs<kBinsOfThread>(bins);
}

// Steps 2 and 3. All threads of the block call this; thread 0 gets the sum, the others 0. groups:
// aligned to 16 bytes. shared: kTreeDoubles doubles in memory that the block shares.
template <typename Block>
HOST_DEVICE double sum_in_fixed_tree(const Block& block, const double* groups, uint64_t num_groups,
                                     double* shared) {
  const auto thread = static_cast<uint32_t>(block.thread());
  const auto num_threads = static_cast<uint32_t>(block.num_threads());
  double* last_sums = shared + kNumThreadSums;
  ROTA_NO_UNROLL
  for (uint32_t i = thread; i < kNumThreadSums; i += num_threads) {
    shared[i] = sum_of_bins(groups, num_groups, i * kBinsOfThread);
  }
  block.sync();
  ROTA_NO_UNROLL
  for (uint32_t i = thread; i < kNumLastSums; i += num_threads) {
    last_sums[i] = sum_in_pairs<kSumsTogether>(shared + i * kSumsTogether);
  }
  block.sync();
  return thread == 0 ? sum_in_pairs<kNumLastSums>(last_sums) : 0;
}

// A block of one thread, for the CPU.
struct LoneThread {
  int thread() const { return 0; }
  int num_threads() const { return 1; }
  void sync() const {}
};

}  // namespace rota
