// How a kernel adds the ranks' contributions (schedule/sum_order.h).
#pragma once

#include <array>
#include <cstdint>

#include "base/host_device.h"
#include "base/limits.h"

namespace rota::cuda {

// Within groups of consecutive ranks and then across them, or along a balanced tree of more than
// two levels. Kernels are compiled for each, because a tree's pending sums take registers.
enum class Sums : uint8_t { kInGroups, kInTree };
inline constexpr std::array kAllSums{Sums::kInGroups, Sums::kInTree};

// The pending sums are registers, so their number is bounded: one for each level of the tree.
inline constexpr int kMostTreeLevels = 4;
inline constexpr int kMostTreeRanks = 1 << kMostTreeLevels;
static_assert(kMaxLocalRanks <= kMostTreeRanks);

// How many of the pending sums become one after each rank's contribution, four bits for each rank.
struct TreeAdditions {
  static constexpr int kBits = 64 / kMostTreeRanks;
  static_assert(kMostTreeLevels < 1 << kBits);

  uint64_t of_ranks;

  HOST_DEVICE uint32_t after(int rank) const {
    return static_cast<uint32_t>(of_ranks >> (rank * kBits)) & ((1u << kBits) - 1);
  }
};

}  // namespace rota::cuda
