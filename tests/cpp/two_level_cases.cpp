// All-reduce in two levels, over ranks that share a host but not a NUMA node: the bits are those of
// two_shot in the same order, whatever the dtype, wire format, length and layout.
#include <array>

#include "calls.h"
#include "check.h"
#include "core/plan.h"
#include "cpu/buffers.h"
#include "cpu/element_loops.h"
#include "numbers.h"
#include "ranks.h"
#include "reference.h"
#include "schedule/direct.h"
#include "schedule/hosts.h"
#include "schedule/two_level.h"

namespace rota::test {
namespace {

using schedule::Algorithm;

// Elements: below a cache line, shards of which some are empty, and rounds that reuse slots.
constexpr uint64_t kLengths[] = {0, 1, 130, 1025, 7001};

// ---- the bits of two_shot

// The orders that have these nodes as blocks.
std::vector<schedule::SumOrder> orders_of(int world_size, int node_size, DType wire) {
  std::vector<schedule::SumOrder> orders{{.group_size = node_size}};
  const schedule::SumOrder tree{.num_shards = 64};
  if (schedule::has_blocks(tree, world_size, node_size)) orders.push_back(tree);
  if (!info(wire).is_floating) orders.push_back({});
  return orders;
}

Call in_two_levels(Call call, int node_size) {
  call.algorithm = Algorithm::kTwoLevel;
  call.node_size = node_size;
  return call;
}

// What a call leaves behind.
struct Result {
  std::vector<std::byte> data;
  std::vector<float> residual;
  cpu::BucketMeasures measures;
};

Result run(Communicator& communicator, const Call& call, uint64_t seed) {
  Result result{std::vector<std::byte>(call.num_bytes()),
                std::vector<float>(call.pass.has_residual ? call.num_elems : 0),
                cpu::BucketMeasures(call.num_elems)};
  for (uint64_t i = 0; i < call.num_elems; ++i) {
    store_bits(call.dtype, result.data.data(), i,
               mixed_bits(call.dtype, hash(seed, communicator.rank(), i)));
  }
  const bool is_bucket = call.kind == CollectiveKind::kReduceBucket;
  communicator.run(call,
                   {.data = result.data.data(),
                    .residual = call.pass.has_residual ? result.residual.data() : nullptr,
                    .measures = is_bucket ? &result.measures : nullptr},
                   seed % 2 == 0 ? CallerThread::kUser : CallerThread::kProgress);
  return result;
}

void check_same(Communicator& communicator, const Call& call, int node_size, uint64_t seed) {
  Call one_level = call;
  one_level.algorithm = Algorithm::kTwoShot;
  const Result expected = run(communicator, one_level, seed);
  const Call two_levels = in_two_levels(call, node_size);
  const Result got = run(communicator, two_levels, seed);
  for (uint64_t i = 0; i < call.num_elems; ++i) {
    const uint64_t bits = load_bits(call.dtype, got.data.data(), i);
    const uint64_t expected_bits = load_bits(call.dtype, expected.data.data(), i);
    if (is_same(call.dtype, bits, expected_bits)) continue;
    fail(join("rank ", communicator.rank(), ", ", two_levels.to_string(), ": element ", i,
              " has bits ", bits, ", with two_shot ", expected_bits));
  }
  check(got.residual == expected.residual, join("residual of ", two_levels.to_string()));
  check_equal(got.measures.num_non_finite, expected.measures.num_non_finite, "non-finite elements");
  for (size_t i = 0; i < expected.measures.squares.size(); ++i) {
    check(is_same(DType::kFloat64, std::bit_cast<uint64_t>(got.measures.squares[i]),
                  std::bit_cast<uint64_t>(expected.measures.squares[i])),
          join("squares of tile ", i, " of ", two_levels.to_string()));
  }
}

Call call_of(CollectiveKind kind, DType dtype, WireFormat wire, ReduceOp op, uint64_t num_elems,
             int world_size) {
  return {.kind = kind,
          .op = op,
          .dtype = dtype,
          .wire = wire,
          .hop = info(wire.dtype).accumulate,
          .num_elems = num_elems,
          .pass = {.divisor = static_cast<float>(world_size)}};
}

void plain_tensors_have_the_bits_of_two_shot(int num_nodes, int node_size) {
  const int world_size = num_nodes * node_size;
  run_ranks(world_size, [&](Communicator& communicator) {
    uint64_t seed = 0;
    for (const DType dtype : reducible_dtypes()) {
      for (const ReduceOp op : defined_ops(dtype)) {
        for (const schedule::SumOrder& order : orders_of(world_size, node_size, dtype)) {
          ++seed;
          Call call = call_of(CollectiveKind::kAllReduce, dtype, {dtype}, op,
                              kLengths[seed % std::size(kLengths)], world_size);
          call.order = order;
          check_same(communicator, call, node_size, seed);
          call.kind = CollectiveKind::kReduce;
          call.root = static_cast<int>(seed) % world_size;
          call.num_elems = kLengths[(seed + 2) % std::size(kLengths)];
          check_same(communicator, call, node_size, seed);
        }
      }
    }
  });
}

void narrower_wires_have_the_bits_of_two_shot(int num_nodes, int node_size) {
  constexpr std::pair<DType, DType> kCasts[] = {
      {DType::kFloat32, DType::kFloat16},    {DType::kFloat32, DType::kBFloat16},
      {DType::kFloat64, DType::kFloat32},    {DType::kFloat64, DType::kFloat16},
      {DType::kFloat16, DType::kBFloat16},   {DType::kBFloat16, DType::kFloat16},
      {DType::kFloat32, DType::kFloat8E4M3}, {DType::kFloat16, DType::kFloat8E5M2},
  };
  const int world_size = num_nodes * node_size;
  run_ranks(world_size, [&](Communicator& communicator) {
    uint64_t seed = 0;
    for (const auto& [dtype, wire] : kCasts) {
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMax}) {
        for (const schedule::SumOrder& order : orders_of(world_size, node_size, wire)) {
          ++seed;
          Call call = call_of(CollectiveKind::kAllReduce, dtype, {wire}, op,
                              kLengths[seed % std::size(kLengths)], world_size);
          call.order = order;
          check_same(communicator, call, node_size, seed);
        }
      }
    }
  });
}

// In every wire format, with error feedback and stochastic rounding in turn.
void buckets_have_the_bits_of_two_shot(int num_nodes, int node_size) {
  const int world_size = num_nodes * node_size;
  run_ranks(world_size, [&](Communicator& communicator) {
    uint64_t seed = 0;
    for (const DType wire : reducible_dtypes()) {
      if (!is_wire_dtype(wire)) continue;
      for (const bool is_block_scaled : {false, true}) {
        if (is_block_scaled && !has_block_scaling(wire)) continue;
        for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
          for (const schedule::SumOrder& order : orders_of(world_size, node_size, wire)) {
            ++seed;
            Call call = call_of(CollectiveKind::kReduceBucket, dtype, {wire, is_block_scaled},
                                ReduceOp::kAvg, kLengths[seed % std::size(kLengths)], world_size);
            call.order = order;
            call.pass.contribution_factor = 0.7f;
            call.pass.result_factor = 0.5f;
            call.pass.has_residual = seed % 2 == 0;
            if (seed % 3 == 0) call.pass.stochastic_seed = seed;
            check_same(communicator, call, node_size, seed);
          }
        }
      }
    }
  });
}

// ---- in turn with everything else

// Exact sums, with ranks late in turn, so that slots and flags carry over from call to call.
void mixed_calls(int num_nodes, int node_size, int num_calls) {
  run_ranks(num_nodes * node_size, [&](Communicator& communicator) {
    Random same_on_all_ranks(static_cast<uint64_t>(node_size));
    Random own(1000 + static_cast<uint64_t>(communicator.rank()));
    for (int i = 0; i < num_calls; ++i) {
      TestCall call = random_call(same_on_all_ranks, communicator.world_size());
      const bool sums = call.kind == CollectiveKind::kAllReduce ||
                        call.kind == CollectiveKind::kReduceBucket ||
                        call.kind == CollectiveKind::kReduce;
      if (sums && same_on_all_ranks.below(3) > 0) {
        call.algorithm.reset();
        call.hop.reset();
        call.node_size = node_size;
      }
      dawdle(own);
      call_and_check(communicator, call, static_cast<uint64_t>(i),
                     own.below(2) == 0 ? CallerThread::kUser : CallerThread::kProgress);
    }
  });
}

// A rank that closes right after the last collective has done its part in it.
void departure_is_no_failure() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    run_ranks(4, [&](Communicator& communicator) {
      call_and_check(communicator, {.num_elems = 5000, .node_size = 2}, seed,
                     CallerThread::kProgress);
    });
  }
}

// ---- the schedule

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
                check_equal(shard.num_elems, uint64_t{0}, "a shard without an area");
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
      const uint64_t others = num_elems - num_elems / static_cast<uint64_t>(num_nodes);
      if (num_elems % static_cast<uint64_t>(64 * num_nodes * node_size) == 0) {
        check_equal(two_shot, 2 * static_cast<uint64_t>(node_size) * others * wire_bytes,
                    "bytes of two_shot");
        check_equal(two_level, others * (hop_bytes + wire_bytes), "bytes of two levels");
      }
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

// ---- the plan

void plan_picks_two_levels_where_bits_and_bytes_allow() {
  const Planner planner(4, std::nullopt, /*node_size=*/2);
  const auto chosen = [&](DType dtype, uint64_t num_elems, const OrderOptions& order) {
    return planner.all_reduce(dtype, num_elems, {.order = order});
  };
  constexpr uint64_t kLong = schedule::kMinTwoLevelBytes;
  const OrderOptions groups{.group_size = 2};
  const OrderOptions tree{.is_tree = true};
  check_equal(chosen(DType::kFloat32, kLong / 4, groups).node_size, 2, "ranks of a node");
  const auto check_chosen = [&](Algorithm expected, DType dtype, uint64_t num_elems,
                                const OrderOptions& order) {
    const Call call = chosen(dtype, num_elems, order);
    check(call.algorithm == expected, call.to_string());
    check_equal(call.node_size, expected == Algorithm::kTwoLevel ? 2 : 0, call.to_string());
    check(Call::from_words(call.to_words()) == call, "a call passes through its words");
  };
  check_chosen(Algorithm::kTwoLevel, DType::kFloat32, kLong / 4, groups);
  check_chosen(Algorithm::kTwoLevel, DType::kFloat16, kLong / 2, tree);
  check_chosen(Algorithm::kTwoLevel, DType::kInt8, kLong, {});
  check_chosen(Algorithm::kTwoShot, DType::kFloat32, kLong / 4 - 1, groups);
  check_chosen(Algorithm::kTwoShot, DType::kFloat32, kLong, {});
  check_chosen(Algorithm::kTwoShot, DType::kFloat8E4M3, kLong, groups);  // more would cross
  const Call reduce = planner.collective(CollectiveKind::kReduce, DType::kFloat32, kLong,
                                         ReduceOp::kSum, 0, std::nullopt, groups);
  check(reduce.algorithm == Algorithm::kTwoLevel, "reduce");
  check(Planner(4).all_reduce(DType::kFloat32, kLong, {.order = groups}).algorithm ==
            Algorithm::kTwoShot,
        "ranks on one node");
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
    {"two_level_plain-2x2", [] { plain_tensors_have_the_bits_of_two_shot(2, 2); }},
    {"two_level_plain-2x3", [] { plain_tensors_have_the_bits_of_two_shot(2, 3); }},
    {"two_level_plain-4x2", [] { plain_tensors_have_the_bits_of_two_shot(4, 2); }},
    {"two_level_plain-2x8", [] { plain_tensors_have_the_bits_of_two_shot(2, 8); }},
    {"two_level_wires-2x2", [] { narrower_wires_have_the_bits_of_two_shot(2, 2); }},
    {"two_level_wires-2x3", [] { narrower_wires_have_the_bits_of_two_shot(2, 3); }},
    {"two_level_wires-4x2", [] { narrower_wires_have_the_bits_of_two_shot(4, 2); }},
    {"two_level_wires-2x8", [] { narrower_wires_have_the_bits_of_two_shot(2, 8); }},
    {"two_level_buckets-2x2", [] { buckets_have_the_bits_of_two_shot(2, 2); }},
    {"two_level_buckets-2x3", [] { buckets_have_the_bits_of_two_shot(2, 3); }},
    {"two_level_buckets-4x2", [] { buckets_have_the_bits_of_two_shot(4, 2); }},
    {"two_level_buckets-2x8", [] { buckets_have_the_bits_of_two_shot(2, 8); }},
    {"two_level_mixed-2x2", [] { mixed_calls(2, 2, 600); }},
    {"two_level_mixed-2x3", [] { mixed_calls(2, 3, 400); }},
    {"two_level_mixed-4x2", [] { mixed_calls(4, 2, 200); }},
    {"two_level_departure", departure_is_no_failure},
    {"two_level_rounds", rounds_fit_in_slots_and_parts_cover_them},
    {"two_level_crossing", less_crosses_between_nodes},
    {"two_level_orders", blocks_of_an_order_are_the_nodes},
    {"two_level_plan", plan_picks_two_levels_where_bits_and_bytes_allow},
    {"two_level_refused", plan_refuses_two_levels_in_another_order},
};

}  // namespace
}  // namespace rota::test
