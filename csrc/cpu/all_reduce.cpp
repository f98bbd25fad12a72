#include "cpu/all_reduce.h"

#include <cstring>

#include "cpu/reducer.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"
#include "schedule/ring.h"

namespace rota::cpu {
namespace {

using schedule::Range;

// Shards and pieces start at multiples of this, which keeps them on cache lines for every dtype.
constexpr uint64_t kGranuleElems = 64;

Reducer make_reducer(const AllReduceArgs& args, int world_size) {
  return Reducer(args.dtype, args.wire, args.hop, args.op, world_size);
}

// One all-reduce in flight: the verbs of its stages, on elements [begin, begin + num_elems).
class AllReduce {
 public:
  AllReduce(const AllReduceArgs& args, Exchange& exchange)
      : exchange_(exchange),
        reducer_(make_reducer(args, exchange.world_size())),
        data_(static_cast<std::byte*>(args.data)),
        num_elems_(args.num_elems),
        rank_(exchange.rank()),
        world_size_(exchange.world_size()) {}

  uint64_t one_shot();
  uint64_t two_shot();
  uint64_t ordered_ring();
  uint64_t ring();

 private:
  std::byte* data(uint64_t elem) const { return data_ + elem * reducer_.elem_bytes(); }

  // The sources of `range` of a round in ascending rank: peers' in-slots, and the own tensor where
  // it needs no cast. slot_elem: where the range starts in the slots.
  void sources(uint64_t round, const Range& range, uint64_t slot_elem, const void** srcs) const {
    for (int peer = 0; peer < world_size_; ++peer) {
      srcs[peer] = peer == rank_ && reducer_.is_plain()
                       ? data(range.begin)
                       : exchange_.in_slot(peer, round) + slot_elem * reducer_.wire_bytes();
    }
  }

  void wait_filled_by_peers(uint64_t round, std::string_view phase) {
    for (int i = 0; i < world_size_ - 1; ++i) {
      exchange_.wait_filled(schedule::rotated_peer(rank_, world_size_, i), round, phase);
    }
  }

  // Rounds of equal length that fit a slot.
  uint64_t num_rounds(uint64_t round_elems) const {
    return schedule::ceil_div(num_elems_, round_elems);
  }
  Range round_range(uint64_t num_rounds, uint64_t round) const {
    return schedule::piece_of(num_elems_, num_rounds, round, kGranuleElems);
  }
  Range shard_of(const Range& round, int owner) const {
    return schedule::piece_of(round.num_elems, static_cast<uint64_t>(world_size_),
                              static_cast<uint64_t>(owner), kGranuleElems);
  }

  void contribute_shards(uint64_t round, const Range& range);
  void reduce_shard(uint64_t round, const Range& range);
  void collect_shards(uint64_t round, const Range& range);

  Exchange& exchange_;
  Reducer reducer_;
  std::byte* data_;
  uint64_t num_elems_;
  int rank_;
  int world_size_;
};

// Slot r % 2 is written again in round r + 2, after this rank waited for all peers to fill round r
// + 1, which they do after they have read round r.
uint64_t AllReduce::one_shot() {
  const uint64_t rounds = num_rounds(exchange_.slot_bytes() / reducer_.wire_bytes());
  for (uint64_t round = 0; round < rounds; ++round) {
    const Range range = round_range(rounds, round);
    reducer_.pack(data(range.begin), exchange_.own_in_slot(round), range.num_elems);
    exchange_.publish_filled(round);
    wait_filled_by_peers(round, "one_shot");
    const void* srcs[kMaxWorldSize];
    sources(round, range, 0, srcs);
    reducer_.reduce(srcs, data(range.begin), nullptr, range.num_elems);
  }
  return rounds;
}

// schedule/direct.h says why two slots suffice.
uint64_t AllReduce::two_shot() {
  const uint64_t rounds = num_rounds(exchange_.slot_bytes() / reducer_.wire_bytes());
  const int64_t num_steps = schedule::two_shot_num_steps(static_cast<int64_t>(rounds));
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto [contribute, reduce] = schedule::two_shot_step(static_cast<int64_t>(rounds), step);
    if (contribute >= 0) {
      const auto round = static_cast<uint64_t>(contribute);
      contribute_shards(round, round_range(rounds, round));
    }
    if (reduce >= 0) {
      const auto round = static_cast<uint64_t>(reduce);
      reduce_shard(round, round_range(rounds, round));
      collect_shards(round, round_range(rounds, round));
    }
  }
  return rounds;
}

void AllReduce::contribute_shards(uint64_t round, const Range& range) {
  for (int owner = 0; owner < world_size_; ++owner) {
    if (owner == rank_ && reducer_.is_plain()) continue;  // read from the tensor instead
    const Range shard = shard_of(range, owner);
    reducer_.pack(data(range.begin + shard.begin),
                  exchange_.own_in_slot(round) + shard.begin * reducer_.wire_bytes(),
                  shard.num_elems);
  }
  exchange_.publish_filled(round);
}

void AllReduce::reduce_shard(uint64_t round, const Range& range) {
  wait_filled_by_peers(round, "two_shot reduce");
  const Range shard = shard_of(range, rank_);
  const Range in_tensor{range.begin + shard.begin, shard.num_elems};
  const void* srcs[kMaxWorldSize];
  sources(round, in_tensor, shard.begin, srcs);
  reducer_.reduce(srcs, data(in_tensor.begin), exchange_.own_out_slot(round), shard.num_elems);
  exchange_.publish_drained(round);
}

void AllReduce::collect_shards(uint64_t round, const Range& range) {
  for (int i = 0; i < world_size_ - 1; ++i) {
    const int owner = schedule::rotated_peer(rank_, world_size_, i);
    const Range shard = shard_of(range, owner);
    exchange_.wait_drained(owner, round, "two_shot collect");
    reducer_.unpack(exchange_.out_slot(owner, round), data(range.begin + shard.begin),
                    shard.num_elems);
  }
}

// Rings: slot i is written after the next rank has filled its slot i - 1, for which it has read
// this rank's slot i - 2, the former content of the same memory.

uint64_t AllReduce::ordered_ring() {
  const int next = schedule::next_rank(rank_, world_size_);
  const int previous = schedule::previous_rank(rank_, world_size_);
  const uint64_t num_chunks = num_rounds(exchange_.slot_bytes() / reducer_.hop_bytes());
  const int64_t num_steps =
      schedule::ordered_ring_num_steps(world_size_, static_cast<int64_t>(num_chunks));
  for (int64_t i = 0; i < num_steps; ++i) {
    const auto step = static_cast<uint64_t>(i);
    const auto [partial, result] =
        schedule::ordered_ring_step(rank_, world_size_, static_cast<int64_t>(num_chunks), i);
    if (step > 0) exchange_.wait_filled(previous, step - 1, "ordered_ring receive");
    if (step > 1) exchange_.wait_filled(next, step - 1, "ordered_ring send");

    if (partial >= 0) {
      const Range chunk = round_range(num_chunks, static_cast<uint64_t>(partial));
      std::byte* own = data(chunk.begin);
      if (rank_ == 0) {
        reducer_.start_partial(own, exchange_.own_in_slot(step), chunk.num_elems);
      } else if (rank_ < world_size_ - 1) {
        reducer_.add_to_partial(exchange_.in_slot(previous, step - 1), own,
                                exchange_.own_in_slot(step), chunk.num_elems);
      } else {
        reducer_.finish_partial(exchange_.in_slot(previous, step - 1), own,
                                exchange_.own_out_slot(step), chunk.num_elems);
      }
    }
    if (result >= 0) {
      const Range chunk = round_range(num_chunks, static_cast<uint64_t>(result));
      const std::byte* sum = exchange_.out_slot(previous, step - 1);
      reducer_.unpack(sum, data(chunk.begin), chunk.num_elems);
      if (next != world_size_ - 1) {
        std::memcpy(exchange_.own_out_slot(step), sum, chunk.num_elems * reducer_.wire_bytes());
      }
    }
    exchange_.publish_filled(step);
  }
  return static_cast<uint64_t>(num_steps);
}

uint64_t AllReduce::ring() {
  const int next = schedule::next_rank(rank_, world_size_);
  const int previous = schedule::previous_rank(rank_, world_size_);
  const int num_steps = schedule::ring_num_steps(world_size_);
  const uint64_t piece_elems =
      exchange_.slot_bytes() / reducer_.hop_bytes() / kGranuleElems * kGranuleElems;
  const uint64_t rounds = num_rounds(piece_elems * static_cast<uint64_t>(world_size_));
  uint64_t slot = 0;  // numbers what this rank writes, over all rounds
  for (uint64_t round = 0; round < rounds; ++round) {
    const Range range = round_range(rounds, round);
    // Before anything has arrived, the own piece starts on its way.
    const Range first = shard_of(range, schedule::ring_step(rank_, world_size_, 0).send_piece);
    if (slot > 1) exchange_.wait_filled(next, slot - 1, "ring send");
    reducer_.start_partial(data(range.begin + first.begin), exchange_.own_in_slot(slot),
                           first.num_elems);
    exchange_.publish_filled(slot);

    for (int step = 0; step < num_steps; ++step, ++slot) {
      const auto [send_piece, recv_piece, action] = schedule::ring_step(rank_, world_size_, step);
      const Range piece = shard_of(range, recv_piece);
      const bool is_last = step == num_steps - 1;  // nobody needs the last piece any more
      std::byte* own = data(range.begin + piece.begin);
      std::byte* to_next = exchange_.own_in_slot(slot + 1);

      exchange_.wait_filled(previous, slot, "ring receive");
      if (!is_last) exchange_.wait_filled(next, slot, "ring send");
      const std::byte* received = exchange_.in_slot(previous, slot);
      switch (action) {
        case schedule::RingAction::kReduce:
          reducer_.add_to_partial(received, own, to_next, piece.num_elems);
          break;
        case schedule::RingAction::kFinish:
          reducer_.finish_partial(received, own, to_next, piece.num_elems);
          break;
        case schedule::RingAction::kCopy:
          reducer_.unpack(received, own, piece.num_elems);
          if (!is_last) std::memcpy(to_next, received, piece.num_elems * reducer_.wire_bytes());
          break;
      }
      if (!is_last) exchange_.publish_filled(slot + 1);
    }
  }
  return slot;
}

}  // namespace

std::optional<uint64_t> message_bytes(const AllReduceArgs& args) {
  if (args.algorithm != schedule::Algorithm::kOneShot) return std::nullopt;
  return args.num_elems * info(args.wire).num_bytes;
}

void contribute(const AllReduceArgs& args, const Mailboxes& mailboxes) {
  make_reducer(args, mailboxes.world_size()).pack(args.data, mailboxes.own(), args.num_elems);
}

void complete(const AllReduceArgs& args, const Mailboxes& mailboxes) {
  const void* srcs[kMaxWorldSize];
  for (int peer = 0; peer < mailboxes.world_size(); ++peer) srcs[peer] = mailboxes.of(peer);
  make_reducer(args, mailboxes.world_size()).reduce(srcs, args.data, nullptr, args.num_elems);
}

uint64_t run_rounds(const AllReduceArgs& args, Exchange& exchange) {
  AllReduce all_reduce(args, exchange);
  switch (args.algorithm) {
    case schedule::Algorithm::kOneShot:
      return all_reduce.one_shot();
    case schedule::Algorithm::kTwoShot:
      return all_reduce.two_shot();
    case schedule::Algorithm::kOrderedRing:
      return all_reduce.ordered_ring();
    case schedule::Algorithm::kRing:
      return all_reduce.ring();
  }
  return 0;
}

}  // namespace rota::cpu
