// Bounds that arrays on the stack rely on.
#pragma once

namespace rota {

// Ranks that share memory on one host; creating a larger group is refused.
inline constexpr int kMaxWorldSize = 64;

// Sums that a tree over so many ranks has pending at once: one for each level.
inline constexpr int kMostSums = 7;
static_assert(kMaxWorldSize <= 1 << (kMostSums - 1));

// Ranks of one process that share one kernel launch.
inline constexpr int kMaxLocalRanks = 16;

}  // namespace rota
