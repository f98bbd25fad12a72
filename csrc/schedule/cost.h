// What a collective on GPUs costs one rank, counted by walking through the steps of the schedules,
// on the host only. tests/test_cost.py holds it against the closed formulas; benchmarks/paper.py
// makes bounds of it.
//
// Every ordered pair of ranks is a first-in-first-out link: the sender stores a message into a slot
// in the receiver's memory, and the receiver loads it from there.
#pragma once

#include <cstdint>

#include "base/fixed_tree.h"
#include "base/tile.h"
#include "schedule/chunk.h"
#include "schedule/ring.h"
#include "schedule/tally.h"

namespace rota::schedule {

// body(num_elems) for each round; rounds are of equal length, of at most capacity_elems.
template <typename Body>
constexpr void for_each_round(const Message& message, uint64_t capacity_elems, Body body) {
  const uint64_t num_rounds = ceil_div(message.num_elems, capacity_elems);
  for (uint64_t round = 0; round < num_rounds; ++round) {
    body(piece_of(message.num_elems, num_rounds, round, message.granule_elems).num_elems);
  }
}

constexpr uint64_t wire_capacity(const Message& message) {
  return message.wire.capacity(message.slot_bytes, message.granule_elems);
}
constexpr uint64_t hop_capacity(const Message& message) {
  return message.hop.capacity(message.slot_bytes, message.granule_elems);
}

// ---- direct: every rank sends to every other one ------------------------------------------------

// Each rank sends all of its contribution to every peer, then sums everybody's; message_bytes maps
// a number of elements to what travels.
template <typename MessageBytes>
constexpr Cost all_to_all_cost(const Message& message, int world_size, uint64_t capacity_elems,
                               MessageBytes message_bytes) {
  Tally tally(message);
  for_each_round(message, capacity_elems, [&](uint64_t num_elems) {
    const uint64_t num_bytes = message_bytes(num_elems);
    if (world_size > 1) {
      tally.read_tensor(num_elems);  // once for all links
      for (int peer = 1; peer < world_size; ++peer) tally.send(num_bytes);
      tally.wait();
      for (int peer = 1; peer < world_size; ++peer) tally.receive(num_bytes);
    }
    tally.read_tensor(num_elems);  // the own contribution to the sum
    tally.write_tensor(num_elems);
  });
  return tally.cost();
}

constexpr Cost one_shot_cost(const Message& message, int world_size) {
  return all_to_all_cost(message, world_size, wire_capacity(message),
                         [&](uint64_t num_elems) { return message.wire.num_bytes(num_elems); });
}

// As one_shot, in packets of 8 bytes that are stored at once: 4 of data and 4 of flag. Who sees the
// flag sees the data, so no flag follows.
inline constexpr uint64_t kPacketBytes = 8;
inline constexpr uint64_t kPacketDataBytes = 4;

constexpr Cost low_latency_cost(const Message& message, int world_size) {
  const uint64_t data_bytes = message.slot_bytes / kPacketBytes * kPacketDataBytes;
  return all_to_all_cost(
      message, world_size, message.wire.capacity(data_bytes, message.granule_elems),
      [&](uint64_t num_elems) {
        return ceil_div(message.wire.num_bytes(num_elems), kPacketDataBytes) * kPacketBytes;
      });
}

// The parts of two_shot: a round is cut into shards, one of them for each of num_ranks ranks, of
// which this one is number `rank`. A slot holds a shard.
class ShardedRounds {
 public:
  constexpr ShardedRounds(const Message& message, Tally& tally, int rank, int num_ranks)
      : message_(message), tally_(tally), rank_(rank), num_ranks_(num_ranks) {}

  constexpr uint64_t capacity(uint64_t slot_elems) const {
    return slot_elems * static_cast<uint64_t>(num_ranks_);
  }
  constexpr uint64_t shard_elems(uint64_t num_elems, int owner) const {
    return piece_of(num_elems, static_cast<uint64_t>(num_ranks_), static_cast<uint64_t>(owner),
                    message_.granule_elems)
        .num_elems;
  }
  constexpr uint64_t own_elems(uint64_t num_elems) const { return shard_elems(num_elems, rank_); }

  constexpr void contribute_shards(uint64_t num_elems) const {
    for (int owner = 0; owner < num_ranks_; ++owner) {
      if (owner == rank_) continue;
      tally_.read_tensor(shard_elems(num_elems, owner));
      tally_.send(message_.wire.num_bytes(shard_elems(num_elems, owner)));
    }
  }
  constexpr void reduce_shard(uint64_t num_elems) const {
    if (num_ranks_ > 1) tally_.wait();
    tally_.read_tensor(own_elems(num_elems));
    for (int peer = 1; peer < num_ranks_; ++peer) {
      tally_.receive(message_.wire.num_bytes(own_elems(num_elems)));
    }
  }
  // The result, while it is in registers, to the own tensor and to everybody.
  constexpr void spread_shard(uint64_t num_elems) const {
    tally_.write_tensor(own_elems(num_elems));
    for (int peer = 1; peer < num_ranks_; ++peer) {
      tally_.send(message_.wire.num_bytes(own_elems(num_elems)));
    }
  }
  constexpr void collect_shards(uint64_t num_elems) const {
    if (num_ranks_ > 1) tally_.wait();
    for (int owner = 0; owner < num_ranks_; ++owner) {
      if (owner == rank_) continue;
      tally_.receive(message_.wire.num_bytes(shard_elems(num_elems, owner)));
      tally_.write_tensor(shard_elems(num_elems, owner));
    }
  }

 private:
  const Message& message_;
  Tally& tally_;
  int rank_;
  int num_ranks_;
};

constexpr Cost two_shot_cost(const Message& message, int rank, int world_size) {
  Tally tally(message);
  const ShardedRounds rounds(message, tally, rank, world_size);
  for_each_round(message, rounds.capacity(wire_capacity(message)), [&](uint64_t num_elems) {
    rounds.contribute_shards(num_elems);
    rounds.reduce_shard(num_elems);
    rounds.spread_shard(num_elems);
    rounds.collect_shards(num_elems);
  });
  return tally.cost();
}

// The first half of two_shot; every rank keeps its shard of num_elems elements.
constexpr Cost reduce_scatter_cost(const Message& message, int rank, int world_size) {
  Tally tally(message);
  const ShardedRounds rounds(message, tally, rank, world_size);
  for_each_round(message, rounds.capacity(wire_capacity(message)), [&](uint64_t num_elems) {
    rounds.contribute_shards(num_elems);
    rounds.reduce_shard(num_elems);
    tally.write_tensor(rounds.own_elems(num_elems));
  });
  return tally.cost();
}

// The second half of two_shot; every rank gives its shard of num_elems elements.
constexpr Cost all_gather_cost(const Message& message, int rank, int world_size) {
  Tally tally(message);
  const ShardedRounds rounds(message, tally, rank, world_size);
  for_each_round(message, rounds.capacity(wire_capacity(message)), [&](uint64_t num_elems) {
    tally.read_tensor(rounds.own_elems(num_elems));
    rounds.spread_shard(num_elems);
    rounds.collect_shards(num_elems);
  });
  return tally.cost();
}

// two_shot of tensors that all ranks have mapped: each rank loads its shard of everybody's tensor
// and stores the sum into everybody's. No slots: one flag says that a tensor may be read, one that
// the sums are in it.
constexpr Cost two_shot_in_place_cost(const Message& message, int rank, int world_size) {
  Tally tally(message);
  const ShardedRounds rounds(message, tally, rank, world_size);
  const uint64_t own_elems = rounds.own_elems(message.num_elems);
  tally.read_tensor(own_elems);
  tally.write_tensor(own_elems);
  if (world_size == 1 || message.num_elems == 0) return tally.cost();
  tally.wait();
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank) continue;
    const uint64_t peers_elems = rounds.shard_elems(message.num_elems, peer);
    tally.send(0);
    tally.load_from_peer(own_elems);
    tally.loaded_by_peer(peers_elems);
    tally.store_to_peer(own_elems);
    tally.stored_by_peer(peers_elems);
    tally.send(0);
  }
  tally.wait();
  return tally.cost();
}

// Groups of group_size neighbours, world_size a multiple of it: reduce-scatter inside the group,
// all-reduce of the shard among the ranks that have this one's place in their groups, all-gather
// inside the group. Partial sums of groups go unrounded, everybody's to everybody.
constexpr Cost hierarchical_cost(const Message& message, int rank, int world_size, int group_size) {
  Tally tally(message);
  const int num_groups = world_size / group_size;
  const ShardedRounds group(message, tally, rank % group_size, group_size);
  const uint64_t slot_elems = min_of(wire_capacity(message), hop_capacity(message));
  for_each_round(message, group.capacity(slot_elems), [&](uint64_t num_elems) {
    group.contribute_shards(num_elems);
    group.reduce_shard(num_elems);
    if (num_groups > 1) {
      const uint64_t own_elems = group.own_elems(num_elems);
      tally.keep_partial(own_elems);
      for (int peer = 1; peer < num_groups; ++peer) tally.send(message.hop.num_bytes(own_elems));
      tally.wait();
      tally.take_partial(own_elems);
      for (int peer = 1; peer < num_groups; ++peer) {
        tally.receive(message.hop.num_bytes(own_elems));
      }
    }
    group.spread_shard(num_elems);
    group.collect_shards(num_elems);
  });
  return tally.cost();
}

// ---- along the ring: every rank sends to the next one -------------------------------------------

constexpr Cost ring_cost(const Message& message, int rank, int world_size) {
  if (world_size == 1) return one_shot_cost(message, world_size);  // alone, there is no ring
  Tally tally(message);
  const uint64_t chunk_elems = hop_capacity(message);
  const uint64_t num_rounds =
      num_chunks_of_pieces(message.num_elems, world_size, chunk_elems, message.granule_elems);
  const int num_steps = ring_num_steps(world_size);
  for (uint64_t round = 0; round < num_rounds; ++round) {
    const auto elems_of = [&](int piece) {
      return chunk_of_piece(message.num_elems, world_size, piece, chunk_elems, round,
                            message.granule_elems)
          .num_elems;
    };
    const uint64_t first_elems = elems_of(ring_step(rank, world_size, 0).send_piece);
    tally.read_tensor(first_elems);
    tally.send(message.hop.num_bytes(first_elems));
    for (int step = 0; step < num_steps; ++step) {
      const RingStep work = ring_step(rank, world_size, step);
      const uint64_t num_elems = elems_of(work.recv_piece);
      tally.wait();
      switch (work.action) {
        case RingAction::kReduce:
          tally.receive(message.hop.num_bytes(num_elems));
          tally.read_tensor(num_elems);
          tally.send(message.hop.num_bytes(num_elems));
          break;
        case RingAction::kFinish:
          tally.receive(message.hop.num_bytes(num_elems));
          tally.read_tensor(num_elems);
          tally.write_tensor(num_elems);
          tally.send(message.wire.num_bytes(num_elems));
          break;
        case RingAction::kCopy:
          tally.receive(message.wire.num_bytes(num_elems));
          tally.write_tensor(num_elems);
          if (step < num_steps - 1) tally.send(message.wire.num_bytes(num_elems));
          break;
      }
    }
  }
  return tally.cost();
}

// Partial sums and results share a slot, half of it each.
constexpr Cost ordered_ring_cost(const Message& message, int rank, int world_size) {
  if (world_size == 1) return one_shot_cost(message, world_size);  // alone, there is no ring
  Tally tally(message);
  const uint64_t half_slot = message.slot_bytes / 2;
  const uint64_t num_chunks =
      ceil_div(message.num_elems, min_of(message.hop.capacity(half_slot, message.granule_elems),
                                         message.wire.capacity(half_slot, message.granule_elems)));
  if (num_chunks == 0) return tally.cost();
  const auto elems_of = [&](int64_t chunk) {
    return piece_of(message.num_elems, num_chunks, static_cast<uint64_t>(chunk),
                    message.granule_elems)
        .num_elems;
  };
  const int last = world_size - 1;
  const int64_t num_steps = ordered_ring_num_steps(world_size, static_cast<int64_t>(num_chunks));
  for (int64_t step = 0; step < num_steps; ++step) {
    const OrderedRingStep work =
        ordered_ring_step(rank, world_size, static_cast<int64_t>(num_chunks), step);
    if (step > 0) tally.wait();
    if (work.partial_chunk >= 0) {
      const uint64_t num_elems = elems_of(work.partial_chunk);
      if (rank > 0) tally.receive(message.hop.num_bytes(num_elems));
      tally.read_tensor(num_elems);
      if (rank < last) {
        tally.send(message.hop.num_bytes(num_elems));
      } else {
        tally.write_tensor(num_elems);
        tally.send(message.wire.num_bytes(num_elems));
      }
    }
    if (work.result_chunk >= 0) {
      const uint64_t num_elems = elems_of(work.result_chunk);
      tally.receive(message.wire.num_bytes(num_elems));
      tally.write_tensor(num_elems);
      if (next_rank(rank, world_size) != last) tally.send(message.wire.num_bytes(num_elems));
    }
  }
  return tally.cost();
}

// A chain along the ring from the root on: every rank but the last one forwards each chunk.
constexpr Cost broadcast_cost(const Message& message, int rank, int world_size, int root) {
  Tally tally(message);
  const int hops_from_root = (rank - root + world_size) % world_size;
  const auto move_chunk = [&](uint64_t num_elems) {
    const uint64_t num_bytes = message.wire.num_bytes(num_elems);
    if (hops_from_root == 0) {
      if (world_size > 1) tally.read_tensor(num_elems);
    } else {
      tally.receive(num_bytes);
      tally.write_tensor(num_elems);
    }
    if (hops_from_root < world_size - 1) tally.send(num_bytes);
    if (world_size > 1) tally.wait();
  };
  for_each_round(message, wire_capacity(message), move_chunk);
  // Once the last chunk has reached the next rank, the rest of the chain is before it.
  if (message.num_elems > 0) {
    for (int hop = 2; hop < world_size; ++hop) tally.wait();
  }
  return tally.cost();
}

// ---- from one rank to one other -----------------------------------------------------------------

constexpr Cost send_cost(const Message& message) {
  Tally tally(message);
  for_each_round(message, wire_capacity(message), [&](uint64_t num_elems) {
    tally.read_tensor(num_elems);
    tally.send(message.wire.num_bytes(num_elems));
    tally.wait();
  });
  return tally.cost();
}

constexpr Cost recv_cost(const Message& message) {
  Tally tally(message);
  for_each_round(message, wire_capacity(message), [&](uint64_t num_elems) {
    tally.wait();
    tally.receive(message.wire.num_bytes(num_elems));
    tally.write_tensor(num_elems);
  });
  return tally.cost();
}

// ---- the kernels around the all-reduce of a gradient bucket -------------------------------------

constexpr uint64_t tile_list_bytes(const Message& message) {
  return ceil_div(message.num_elems, kTileElems) * kTileEntryBytes;
}

// Gradients to the wire format, with its scales. No link, no wait.
constexpr Cost pack_cost(const Message& message) {
  Cost cost;
  cost.hbm_read_bytes = message.tensor.num_bytes(message.num_elems) + tile_list_bytes(message);
  cost.hbm_written_bytes = message.wire.num_bytes(message.num_elems);
  return cost;
}

// The wire format to gradients, and one sum of squares, a float64, for each group of tiles.
constexpr Cost unpack_cost(const Message& message) {
  Cost cost;
  cost.hbm_read_bytes = message.wire.num_bytes(message.num_elems) + tile_list_bytes(message);
  cost.hbm_written_bytes = message.tensor.num_bytes(message.num_elems) +
                           ceil_div(message.num_elems, kTreeGroup * kTileElems) * sizeof(double);
  return cost;
}

}  // namespace rota::schedule
