// One all-reduce in two levels in flight (schedule/two_level.h), with the arithmetic of a Reducer
// or a BucketReducer, whose order is that within a node and over the nodes.
//
//   slot: partial sums of the own shard | an area for each shard of the node
//
// Only its owner writes a slot: contributions to the areas of its peers' shards, and the sums of
// its own shard, as they arrive, to the area of that one. csrc/README.md explains why two slots
// suffice.
#pragma once

#include "base/limits.h"
#include "cpu/copy.h"
#include "cpu/exchange.h"
#include "cpu/reducer.h"
#include "schedule/direct.h"
#include "schedule/two_level.h"

namespace rota::cpu {

template <typename AnyReducer>
class TwoLevel {
 public:
  TwoLevel(const AnyReducer& reducer, const Call& call, int rank, int world_size)
      : reducer_(reducer),
        call_(call),
        nodes_(schedule::nodes_of(world_size, call.node_size)),
        levels_(nodes_.levels(kGranuleElems)),
        rank_(rank) {}

  // Returns the number of rounds as Exchange counts them: stages.
  uint64_t run(Exchange& exchange) {
    const uint64_t wire_bytes = wire().num_bytes(kGranuleElems);
    const uint64_t hop_bytes = kGranuleElems * reducer_.hop_bytes();
    const schedule::SlotAreas areas =
        schedule::areas_of_slot(nodes_, exchange.slot_bytes(), wire_bytes, hop_bytes);
    partial_bytes_ = areas.granules * hop_bytes;
    area_bytes_ = areas.granules * wire_bytes;
    const uint64_t num_rounds =
        schedule::ceil_div(call_.num_elems, areas.round_granules() * kGranuleElems);
    const auto range_of = [&](uint64_t round) {
      return schedule::even_shard(call_.num_elems, num_rounds, round, kGranuleElems);
    };

    const int64_t num_steps = schedule::two_shot_num_steps(static_cast<int64_t>(num_rounds));
    for (int64_t step = 0; step < num_steps; ++step) {
      const auto [contributed, reduced] =
          schedule::two_shot_step(static_cast<int64_t>(num_rounds), step);
      if (contributed >= 0) {
        const auto number = static_cast<uint64_t>(contributed);
        contribute(range_of(number), exchange.own_slot(number));
        exchange.publish_filled(number);
      }
      if (reduced < 0) continue;

      const auto number = static_cast<uint64_t>(reduced);
      const Range round = range_of(number);
      const auto slot_of = [&](int rank) { return exchange.slot(rank, number); };
      const auto end_of = [&](Stage stage) { return schedule::step_of(number, stage); };

      for_each_of_node([&](int peer) { exchange.wait_filled(peer, number, "two_level partial"); });
      sum_in_node(round, slot_of);
      exchange.publish_drained(end_of(Stage::kPartial));

      for_each_of_rail(
          [&](int peer) { exchange.wait_drained(peer, end_of(Stage::kPartial), "two_level sum"); });
      sum_over_nodes(round, slot_of);
      exchange.publish_drained(end_of(Stage::kSum));

      for_each_of_rail([&](int peer) {
        exchange.wait_drained(peer, end_of(Stage::kSum), "two_level spread");
        if (node_receives()) spread(round, nodes_.node_of(peer), slot_of);
      });
      exchange.publish_drained(end_of(Stage::kSpread));

      for_each_of_node([&](int peer) {
        exchange.wait_drained(peer, end_of(Stage::kSpread), "two_level collect");
        if (!is_receiver(rank_)) return;
        const int owner = nodes_.place_of(peer);
        const Range shard = shard_of(round, owner);
        reducer_.unpack(place_of(shard, owner, slot_of(peer), round), shard);
      });
    }
    return schedule::step_of(num_rounds, Stage::kPartial);
  }

 private:
  using Range = schedule::Range;
  using Stage = schedule::Stage;
  static constexpr uint64_t kGranuleElems = AnyReducer::kGranuleElems;

  const WireFormat& wire() const { return reducer_.wire(); }
  int node() const { return nodes_.node_of(rank_); }
  int place() const { return nodes_.place_of(rank_); }
  bool is_receiver(int rank) const {
    return is_among(row_of(call_.kind).receivers, rank, call_.root);
  }
  // Whether a rank of this node receives the sum.
  bool node_receives() const {
    return row_of(call_.kind).receivers != Ranks::kRoot || nodes_.node_of(call_.root) == node();
  }

  Range shard_of(const Range& round, int place) const { return levels_.shard_of(round, place); }
  Range part_of(const Range& round, int node) const {
    return levels_.part_of(shard_of(round, place()), node);
  }
  // Where a range of a shard lies in a slot, as contributions or sums.
  WirePlace place_of(const Range& range, int owner, std::byte* slot, const Range& round) const {
    const Range shard = shard_of(round, owner);
    std::byte* area = slot + partial_bytes_ + static_cast<uint64_t>(owner) * area_bytes_;
    return wire().from(wire().place(area, shard.num_elems), range.begin - shard.begin);
  }

  void contribute(const Range& round, std::byte* own_slot) const {
    for (int owner = 0; owner < nodes_.node_size; ++owner) {
      if (owner == place()) continue;  // read from the tensor instead
      const Range shard = shard_of(round, owner);
      reducer_.pack(shard, place_of(shard, owner, own_slot, round));
    }
  }

  template <typename SlotOf>
  void sum_in_node(const Range& round, SlotOf slot_of) const {
    const Range shard = shard_of(round, place());
    WirePlace srcs[kMaxWorldSize / 2];
    for (int i = 0; i < nodes_.node_size; ++i) {
      srcs[i] = i == place() ? kFromTensor
                             : place_of(shard, place(), slot_of(nodes_.rank_at(node(), i)), round);
    }
    reducer_.sum_to_partial({srcs, static_cast<size_t>(nodes_.node_size)}, shard, slot_of(rank_));
  }

  template <typename SlotOf>
  void sum_over_nodes(const Range& round, SlotOf slot_of) const {
    const Range part = part_of(round, node());
    const uint64_t begin = part.begin - shard_of(round, place()).begin;
    const std::byte* partials[kMaxWorldSize / 2];
    for (int i = 0; i < nodes_.num_nodes; ++i) {
      partials[i] = slot_of(nodes_.rank_at(i, place())) + begin * reducer_.hop_bytes();
    }
    reducer_.sum_partials({partials, static_cast<size_t>(nodes_.num_nodes)}, part,
                          place_of(part, place(), slot_of(rank_), round));
  }

  template <typename SlotOf>
  void spread(const Range& round, int node, SlotOf slot_of) const {
    const Range part = part_of(round, node);
    const WirePlace from = place_of(part, place(), slot_of(nodes_.rank_at(node, place())), round);
    const WirePlace to = place_of(part, place(), slot_of(rank_), round);
    copy_bytes(to.payload, from.payload, wire().payload_bytes(part.num_elems));
    copy_bytes(to.scales, from.scales, wire().num_scales(part.num_elems));
    if (is_receiver(rank_)) reducer_.unpack(to, part);
  }

  // Calls body(peer) for the other ranks of the node, or of the rail, from the next one on.
  template <typename Body>
  void for_each_of_node(const Body& body) const {
    for (int i = 0; i < nodes_.node_size - 1; ++i) {
      body(nodes_.rank_at(node(), schedule::rotated_peer(place(), nodes_.node_size, i)));
    }
  }
  template <typename Body>
  void for_each_of_rail(const Body& body) const {
    for (int i = 0; i < nodes_.num_nodes - 1; ++i) {
      body(nodes_.rank_at(schedule::rotated_peer(node(), nodes_.num_nodes, i), place()));
    }
  }

  const AnyReducer& reducer_;
  const Call& call_;
  schedule::Nodes nodes_;
  schedule::Levels levels_;
  int rank_;
  uint64_t partial_bytes_ = 0;  // of a slot, at its beginning
  uint64_t area_bytes_ = 0;     // of each area behind them
};

}  // namespace rota::cpu
