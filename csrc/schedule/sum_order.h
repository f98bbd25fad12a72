// The order in which a sum adds the ranks' contributions, which decides its bits. Each order is a
// tree over neighbours, so that one pass over the ranks adds in any of them, with a stack of at
// most kMostSums sums.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/limits.h"

namespace rota::schedule {

// At most one of them is not 0; both 0: ascending rank, left to right.
struct SumOrder {
  int group_size = 0;       // consecutive ranks that are summed first; then their sums, ascending
  uint32_t num_shards = 0;  // logical shards, a power of two, of a balanced binary tree

  bool operator==(const SumOrder&) const = default;
};

// Ranks first, first + 1 ... under a node of the tree, and the shards that are theirs.
struct TreeNode {
  int first = 0;
  int num_ranks;
  uint32_t first_shard = 0;
  uint32_t num_shards;

  constexpr bool is_leaf() const { return num_ranks == 1; }
  constexpr int last() const { return first + num_ranks - 1; }
  // The half of the node that holds `rank`. Each half has half of the shards; if the number of
  // ranks is odd, the first half has one more.
  constexpr TreeNode towards(int rank) const {
    const int num_left = num_ranks - num_ranks / 2;
    if (rank < first + num_left) return {first, num_left, first_shard, num_shards / 2};
    return {first + num_left, num_ranks - num_left, first_shard + num_shards / 2, num_shards / 2};
  }
};

// The shards of a rank: an aligned block of 2^k. num_shards: a power of two, at least world_size.
constexpr TreeNode shards_of(uint32_t num_shards, int world_size, int rank) {
  TreeNode node{.num_ranks = world_size, .num_shards = num_shards};
  while (!node.is_leaf()) node = node.towards(rank);
  return node;
}

// How many times the two topmost sums of the stack become one, after a rank's contribution was put
// on it.
constexpr int num_additions(const SumOrder& order, int world_size, int rank) {
  int num = 0;
  if (order.num_shards != 0) {
    for (TreeNode node{.num_ranks = world_size}; !node.is_leaf(); node = node.towards(rank)) {
      if (rank == node.last()) ++num;
    }
    return num;
  }
  const int group_size = order.group_size == 0 ? world_size : order.group_size;
  const int place = rank % group_size;
  if (place > 0) ++num;
  if (rank >= group_size && place == group_size - 1) ++num;
  return num;
}

// The group size whose sums are in the same order, world_size if that is ascending rank; none if
// groups do not give it.
constexpr std::optional<int> as_groups(const SumOrder& order, int world_size) {
  for (int group_size = world_size; group_size > 0; --group_size) {
    if (world_size % group_size != 0) continue;
    bool is_same = true;
    for (int rank = 0; rank < world_size; ++rank) {
      is_same &= num_additions({.group_size = group_size}, world_size, rank) ==
                 num_additions(order, world_size, rank);
    }
    if (is_same) return group_size;
  }
  return std::nullopt;
}

// The order within blocks of consecutive ranks, and over the blocks' sums, where has_blocks().
constexpr SumOrder order_of_blocks(const SumOrder& order) {
  return {.num_shards = order.num_shards};
}

// Whether the sum over blocks of block_size ranks of the sums within them, each in
// order_of_blocks(), is the sum in `order`.
constexpr bool has_blocks(const SumOrder& order, int world_size, int block_size) {
  const SumOrder of_blocks = order_of_blocks(order);
  for (int rank = 0; rank < world_size; ++rank) {
    const int place = rank % block_size;
    int num = num_additions(of_blocks, block_size, place);
    if (place == block_size - 1) {
      num += num_additions(of_blocks, world_size / block_size, rank / block_size);
    }
    if (num != num_additions(order, world_size, rank)) return false;
  }
  return true;
}

// num_additions of each rank, for the loops that add.
class Additions {
 public:
  constexpr Additions(const SumOrder& order, int world_size) {
    if (order == SumOrder{}) return;
    for (int rank = 0; rank < world_size; ++rank) {
      const int num = num_additions(order, world_size, rank);
      of_rank_[static_cast<size_t>(rank)] = static_cast<uint8_t>(num);
      if (num != (rank > 0 ? 1 : 0)) is_ascending_ = false;
    }
  }

  // Null if the sums are those of ascending rank, left to right.
  constexpr const uint8_t* of_ranks() const { return is_ascending_ ? nullptr : of_rank_.data(); }

 private:
  std::array<uint8_t, kMaxWorldSize> of_rank_;  // unset if the sums are ascending
  bool is_ascending_ = true;
};

}  // namespace rota::schedule
