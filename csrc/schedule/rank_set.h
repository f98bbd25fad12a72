// The ranks that take part in a phase of a collective: all, those of one group, or those with the
// same place in each group. Integers only.
#pragma once

#include "base/host_device.h"

namespace rota::schedule {

// Ranks first, first + stride, ...: num_ranks of them, ascending.
struct RankSet {
  int first;
  int stride;
  int num_ranks;

  HOST_DEVICE constexpr int rank_at(int place) const { return first + place * stride; }
  HOST_DEVICE constexpr int place_of(int rank) const { return (rank - first) / stride; }
};

HOST_DEVICE constexpr RankSet nobody() { return {0, 1, 0}; }
HOST_DEVICE constexpr RankSet only(int rank) { return {rank, 1, 1}; }
HOST_DEVICE constexpr RankSet everyone(int world_size) { return {0, 1, world_size}; }

// The two levels of a hierarchical reduction: groups are group_size consecutive ranks; group_size
// divides world_size.
HOST_DEVICE constexpr RankSet group_of(int rank, int group_size) {
  return {rank / group_size * group_size, 1, group_size};
}
HOST_DEVICE constexpr RankSet across_groups(int rank, int world_size, int group_size) {
  return {rank % group_size, group_size, world_size / group_size};
}

}  // namespace rota::schedule
