// The schedule of an all-reduce in two levels, over ranks that share a host but not a NUMA node.
#include "schedule/two_level.h"

#include "calls.h"
#include "check.h"
#include "core/plan.h"
#include "schedule/direct.h"
#include "schedule/hosts.h"

namespace rota::test {
namespace {

using schedule::Algorithm;

constexpr std::pair<int, int> kLayouts[] = {{2, 2}, {2, 3}, {4, 2}, {2, 8}, {8, 8}, {2, 32}};

void rounds_fit_in_slots_and_parts_cover_them() {
  for (const auto& [num_nodes, node_size] : kLayouts) {
    const schedule::Nodes nodes{node_size, num_nodes};
    const schedule::Levels levels = nodes.levels(64);
    for (const uint64_t slot_bytes : {uint64_t{4096}, uint64_t{12288}, uint64_t{64 << 10}}) {
      for (const uint64_t wire_bytes : {64, 128, 256, 512, 528, 1032, 2048}) {
        for (const uint64_t hop_bytes : {64, 256, 512, 2048}) {
          const auto [granules, num_areas] =
              schedule::areas_of_slot(nodes, slot_bytes, wire_bytes, hop_bytes);
          check(granules > 0 && num_areas > 0, "a round is not empty");
          check(granules * (hop_bytes + num_areas * wire_bytes) <= slot_bytes, "it fits in a slot");
          // Shorter rounds, too, have shards only where there are areas.
          for (uint64_t round = 1; round <= granules * num_areas; ++round) {
            for (int place = 0; place < node_size; ++place) {
              const schedule::Range shard = levels.shard_of({0, 64 * round}, place);
              if (static_cast<uint64_t>(place) >= num_areas) {
                check_equal(shard.num_elems, 0, "a shard without an area");
              }
              check(shard.num_elems <= 64 * granules, "a shard fits in its area");
            }
          }
        }
      }
    }
    for (const uint64_t num_elems : {0, 1, 63, 64, 65, 1000, 43648}) {
      uint64_t end = 0;
      for (int place = 0; place < node_size; ++place) {
        const schedule::Range shard = levels.shard_of({0, num_elems}, place);
        for (int node = 0; node < num_nodes; ++node) {
          const schedule::Range part = levels.part_of(shard, node);
          check(part.num_elems == 0 || part.begin == end, "parts follow each other");
          check(part.begin % 64 == 0 || part.num_elems == 0, "parts start at granules");
          end += part.num_elems;
        }
        check_equal(end, shard.begin + shard.num_elems, "the end of a shard");
      }
      check_equal(end, num_elems, "the end of the parts");
    }
  }
}

// What the ranks of one node read of slots that ranks of other nodes wrote last.
struct Crossing {
  uint64_t two_shot = 0;
  uint64_t two_level = 0;
};

Crossing bytes_into_node_0(const schedule::Nodes& nodes, uint64_t num_elems, uint64_t wire_bytes,
                           uint64_t hop_bytes) {
  Crossing bytes;
  const int world_size = nodes.node_size * nodes.num_nodes;
  const auto shard_bytes = [&](int owner) {
    return wire_bytes * schedule::even_shard(num_elems, static_cast<uint64_t>(world_size),
                                             static_cast<uint64_t>(owner), 64)
                            .num_elems;
  };
  const schedule::Levels levels = nodes.levels(64);
  const auto elems_of = [&](int place, int node) {
    return levels.part_of(levels.shard_of({0, num_elems}, place), node).num_elems;
  };
  for (int rank = 0; rank < nodes.node_size; ++rank) {
    for (int peer = nodes.node_size; peer < world_size; ++peer) {
      bytes.two_shot += shard_bytes(rank);  // its contribution
      bytes.two_shot += shard_bytes(peer);  // its sum
    }
    for (int node = 1; node < nodes.num_nodes; ++node) {
      bytes.two_level += hop_bytes * elems_of(rank, 0);      // its partial sum
      bytes.two_level += wire_bytes * elems_of(rank, node);  // its sum
    }
  }
  return bytes;
}

void less_crosses_between_nodes() {
  for (const auto& [num_nodes, node_size] : kLayouts) {
    const schedule::Nodes nodes{node_size, num_nodes};
    const uint64_t num_elems = uint64_t{64} * 64 * 64;
    for (const DType wire : reducible_dtypes()) {
      const uint64_t wire_bytes = info(wire).num_bytes;
      const uint64_t hop_bytes = info(info(wire).accumulate).num_bytes;
      const auto [two_shot, two_level] = bytes_into_node_0(nodes, num_elems, wire_bytes, hop_bytes);
      check_equal(schedule::crosses_less(node_size, wire_bytes, hop_bytes), two_level < two_shot,
                  join("that less crosses for ", name(wire), " with ", node_size, " ranks a node"));
    }
  }
}

void blocks_of_an_order_are_the_nodes() {
  for (const auto& [num_nodes, node_size] : kLayouts) {
    const int world_size = num_nodes * node_size;
    std::vector<std::string> ids;
    for (int rank = 0; rank < world_size; ++rank) ids.push_back(std::to_string(rank / node_size));
    check_equal(schedule::has_blocks({.num_shards = 64}, world_size, node_size),
                schedule::Hosts(ids).are_nodes_of_tree(), "a tree of blocks");
    check(!schedule::has_blocks({}, world_size, node_size), "ascending ranks have no blocks");
    for (int group_size = 2; group_size < world_size; ++group_size) {
      if (world_size % group_size != 0) continue;
      check_equal(schedule::has_blocks({.group_size = group_size}, world_size, node_size),
                  group_size == node_size, "groups are the nodes");
    }
  }
}

void plan_refuses_two_levels_in_another_order() {
  const AllReduceOptions two_level{.algorithm = Algorithm::kTwoLevel};
  const auto refused = [&](const Planner& planner, OrderOptions order) {
    AllReduceOptions options = two_level;
    options.order = order;
    return std::string(expect_error(ErrorKind::kValue, [&] {
                         planner.all_reduce(DType::kFloat32, 1, options);
                       }).what());
  };
  check_contains(refused(Planner(4), {.group_size = 2}), "ROTA_NUMA_NODE");
  const Planner planner(8, std::nullopt, /*node_size=*/2);
  check_contains(refused(planner, {}), "the 2 ranks of each NUMA node, not all ranks");
  check_contains(refused(planner, {}), "pass group_size=2 or order='tree'");
  check_contains(refused(planner, {.group_size = 4}), "not groups of 4; pass group_size=2");
  const Planner odd(6, std::nullopt, /*node_size=*/2);
  check_contains(refused(odd, {.is_tree = true}), "no subtree of order='tree'; pass group_size=2,");
  check(Planner(1).all_reduce(DType::kFloat32, 1, two_level).algorithm == Algorithm::kOneShot,
        "one rank");
  expect_error(ErrorKind::kValue, [&] {
    Planner(4, Planner::Gpu{.tuning = schedule::kLocalTuning, .most_packet_bytes = 0})
        .all_reduce(DType::kFloat32, 1, two_level);
  });
}

const CaseTable kCases{
    {"two_level_rounds", rounds_fit_in_slots_and_parts_cover_them},
    {"two_level_crossing", less_crosses_between_nodes},
    {"two_level_refused", plan_refuses_two_levels_in_another_order},
    {"two_level_orders", blocks_of_an_order_are_the_nodes},
};

}  // namespace
}  // namespace rota::test
