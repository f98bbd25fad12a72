// An all-reduce in two levels, for ranks that share a host but not a NUMA node. Integers only.
//
//   partial   a rank sums its shard of a round over its node's contributions, in the accumulate
//             dtype
//   sum       it sums its part of that shard over the partial sums of its rail, which are the
//             ranks at the same place of every node, and rounds the sum
//   spread    it copies the shard's other parts from its rail
//   collect   it reads the other shards from its node
//
// A node reads (num_nodes-1)/num_nodes * (partial sums + sums) of memory that other nodes wrote:
// one partial sum for each node, where two_shot reads every contribution. Not yet measured on a
// machine with several nodes.
#pragma once

#include <cstdint>

#include "schedule/levels.h"

namespace rota::schedule {

// The ranks of a node are consecutive, and each node has as many.
struct Nodes {
  int node_size;
  int num_nodes;

  constexpr int node_of(int rank) const { return rank / node_size; }
  constexpr int place_of(int rank) const { return rank % node_size; }
  constexpr int rank_at(int node, int place) const { return node * node_size + place; }
  constexpr Levels levels(uint64_t granule) const { return {node_size, num_nodes, granule}; }
};

constexpr Nodes nodes_of(int world_size, int node_size) {
  return {node_size, world_size / node_size};
}

// A slot: the partial sums of a shard, and then an area for each shard, which lies at the same
// place in every round, however short the round is.
struct SlotAreas {
  uint64_t granules;   // in each area, of a shard
  uint64_t num_areas;  // so many shards, the first ones, are not empty

  constexpr uint64_t round_granules() const { return granules * num_areas; }
};

constexpr SlotAreas areas_of_slot(const Nodes& nodes, uint64_t slot_bytes,
                                  uint64_t granule_wire_bytes, uint64_t granule_hop_bytes) {
  const auto node_size = static_cast<uint64_t>(nodes.node_size);
  const uint64_t granules =
      max_of(slot_bytes / (node_size * granule_wire_bytes + granule_hop_bytes), 1);
  const uint64_t area_bytes = granules * granule_wire_bytes;
  return {granules, min_of(node_size, (slot_bytes - granules * granule_hop_bytes) / area_bytes)};
}

// A round's stages, whose ends a rank publishes in this order.
enum class Stage : uint8_t { kPartial, kSum, kSpread };

constexpr uint64_t step_of(uint64_t round, Stage stage) {
  return 3 * round + static_cast<uint64_t>(stage);
}

// Whether less crosses between nodes than in two_shot, where a node reads each contribution of
// others to its ranks' shards, and each of its ranks reads the others' sums. Bytes of one element.
constexpr bool crosses_less(int node_size, uint64_t wire_bytes, uint64_t hop_bytes) {
  return hop_bytes + wire_bytes < 2 * static_cast<uint64_t>(node_size) * wire_bytes;
}

}  // namespace rota::schedule
