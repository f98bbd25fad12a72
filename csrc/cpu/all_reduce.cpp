#include "cpu/all_reduce.h"

#include "cpu/copy.h"
#include "cpu/reducer.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"
#include "schedule/ring.h"

namespace rota::cpu {
namespace {

using schedule::Range;

// Shards and pieces start at multiples of this, which keeps them on cache lines for every dtype.
constexpr uint64_t kGranuleElems = 64;

// One all-reduce in flight. The stages of the direct algorithms take the place of the slots as
// slot_of(rank), because a message in the mailboxes goes through the same ones.
class AllReduce {
 public:
  AllReduce(const AllReduceArgs& args, int rank, int world_size)
      : reducer_(args.dtype, args.wire, args.hop, args.op, world_size),
        data_(static_cast<std::byte*>(args.data)),
        num_elems_(args.num_elems),
        rank_(rank),
        world_size_(world_size) {}

  uint64_t one_shot(Exchange& exchange) const;
  uint64_t two_shot(Exchange& exchange) const;
  uint64_t ordered_ring(Exchange& exchange) const;
  uint64_t ring(Exchange& exchange) const;

  Range whole() const { return {0, num_elems_}; }
  // one_shot: everything is contributed, and everything reduced from everybody's slot.
  void contribute_all(const Range& range, std::byte* own_slot) const {
    reducer_.pack(data(range.begin), own_slot, range.num_elems);
  }
  template <typename SlotOf>
  void reduce_all(const Range& range, SlotOf slot_of) const;
  // two_shot: the shards are contributed; each rank reduces its own from everybody's slot and puts
  // the sum back there; then it collects the others' from its own slot.
  void contribute_shards(const Range& range, std::byte* own_slot) const;
  template <typename SlotOf>
  void reduce_shard(const Range& range, SlotOf slot_of) const;
  void collect_shards(const Range& range, const std::byte* own_slot, uint64_t round,
                      Exchange& exchange) const;

 private:
  std::byte* data(uint64_t elem) const { return data_ + elem * reducer_.elem_bytes(); }

  void wait_filled_by_peers(Exchange& exchange, uint64_t round, std::string_view phase) const {
    for (int i = 0; i < world_size_ - 1; ++i) {
      exchange.wait_filled(schedule::rotated_peer(rank_, world_size_, i), round, phase);
    }
  }

  // Rounds of equal length, of at most round_elems each.
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

  Reducer reducer_;
  std::byte* data_;
  uint64_t num_elems_;
  int rank_;
  int world_size_;
};

template <typename SlotOf>
void AllReduce::reduce_all(const Range& range, SlotOf slot_of) const {
  const void* srcs[kMaxWorldSize];
  for (int peer = 0; peer < world_size_; ++peer) srcs[peer] = slot_of(peer);
  if (reducer_.is_plain()) srcs[rank_] = data(range.begin);
  reducer_.reduce(srcs, data(range.begin), {}, range.num_elems);
}

// Two slots suffice: that of round r is written again in round r + 2, after this rank waited for
// all peers to fill round r + 1, which they do after they have read round r.
uint64_t AllReduce::one_shot(Exchange& exchange) const {
  const uint64_t rounds = num_rounds(exchange.slot_bytes() / reducer_.wire_bytes());
  for (uint64_t round = 0; round < rounds; ++round) {
    const Range range = round_range(rounds, round);
    contribute_all(range, exchange.own_slot(round));
    exchange.publish_filled(round);
    wait_filled_by_peers(exchange, round, "one_shot");
    reduce_all(range, [&](int peer) { return exchange.slot(peer, round); });
  }
  return rounds;
}

void AllReduce::contribute_shards(const Range& range, std::byte* own_slot) const {
  for (int owner = 0; owner < world_size_; ++owner) {
    if (owner == rank_ && reducer_.is_plain()) continue;  // read from the tensor instead
    const Range shard = shard_of(range, owner);
    reducer_.pack(data(range.begin + shard.begin), own_slot + shard.begin * reducer_.wire_bytes(),
                  shard.num_elems);
  }
}

template <typename SlotOf>
void AllReduce::reduce_shard(const Range& range, SlotOf slot_of) const {
  const Range shard = shard_of(range, rank_);
  const void* srcs[kMaxWorldSize];
  std::byte* wire_outs[kMaxWorldSize];
  size_t num_outs = 0;
  for (int peer = 0; peer < world_size_; ++peer) {
    std::byte* place = slot_of(peer) + shard.begin * reducer_.wire_bytes();
    srcs[peer] = place;
    if (peer != rank_) wire_outs[num_outs++] = place;
  }
  if (reducer_.is_plain()) srcs[rank_] = data(range.begin + shard.begin);
  reducer_.reduce(srcs, data(range.begin + shard.begin), {wire_outs, num_outs}, shard.num_elems);
}

void AllReduce::collect_shards(const Range& range, const std::byte* own_slot, uint64_t round,
                               Exchange& exchange) const {
  for (int i = 0; i < world_size_ - 1; ++i) {
    const int owner = schedule::rotated_peer(rank_, world_size_, i);
    const Range shard = shard_of(range, owner);
    exchange.wait_drained(owner, round, "two_shot collect");
    reducer_.unpack(own_slot + shard.begin * reducer_.wire_bytes(), data(range.begin + shard.begin),
                    shard.num_elems);
  }
}

// schedule/direct.h says why two slots suffice.
uint64_t AllReduce::two_shot(Exchange& exchange) const {
  const uint64_t rounds = num_rounds(exchange.slot_bytes() / reducer_.wire_bytes());
  const int64_t num_steps = schedule::two_shot_num_steps(static_cast<int64_t>(rounds));
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto [contribute, reduce] = schedule::two_shot_step(static_cast<int64_t>(rounds), step);
    if (contribute >= 0) {
      const auto round = static_cast<uint64_t>(contribute);
      contribute_shards(round_range(rounds, round), exchange.own_slot(round));
      exchange.publish_filled(round);
    }
    if (reduce >= 0) {
      const auto round = static_cast<uint64_t>(reduce);
      const Range range = round_range(rounds, round);
      wait_filled_by_peers(exchange, round, "two_shot reduce");
      reduce_shard(range, [&](int peer) { return exchange.slot(peer, round); });
      exchange.publish_drained(round);
      collect_shards(range, exchange.own_slot(round), round, exchange);
    }
  }
  return rounds;
}

// Rings: slot i is written after the next rank has filled its slot i - 1, for which it has read
// this rank's slot i - 2, the former content of the same memory.

uint64_t AllReduce::ordered_ring(Exchange& exchange) const {
  const int next = schedule::next_rank(rank_, world_size_);
  const int previous = schedule::previous_rank(rank_, world_size_);
  // Partial sums travel in the first half of a slot, results in the second.
  const size_t half_slot = exchange.slot_bytes() / 2;
  const uint64_t num_chunks = num_rounds(half_slot / reducer_.hop_bytes());
  const int64_t num_steps =
      schedule::ordered_ring_num_steps(world_size_, static_cast<int64_t>(num_chunks));
  for (int64_t i = 0; i < num_steps; ++i) {
    const auto step = static_cast<uint64_t>(i);
    const auto [partial, result] =
        schedule::ordered_ring_step(rank_, world_size_, static_cast<int64_t>(num_chunks), i);
    if (step > 0) exchange.wait_filled(previous, step - 1, "ordered_ring receive");
    if (step > 1) exchange.wait_filled(next, step - 1, "ordered_ring send");

    if (partial >= 0) {
      const Range chunk = round_range(num_chunks, static_cast<uint64_t>(partial));
      std::byte* own = data(chunk.begin);
      if (rank_ == 0) {
        reducer_.start_partial(own, exchange.own_slot(step), chunk.num_elems);
      } else if (rank_ < world_size_ - 1) {
        reducer_.add_to_partial(exchange.slot(previous, step - 1), own, exchange.own_slot(step),
                                chunk.num_elems);
      } else {
        reducer_.finish_partial(exchange.slot(previous, step - 1), own,
                                exchange.own_slot(step) + half_slot, chunk.num_elems);
      }
    }
    if (result >= 0) {
      const Range chunk = round_range(num_chunks, static_cast<uint64_t>(result));
      const std::byte* sum = exchange.slot(previous, step - 1) + half_slot;
      reducer_.unpack(sum, data(chunk.begin), chunk.num_elems);
      if (next != world_size_ - 1) {
        copy_bytes(exchange.own_slot(step) + half_slot, sum,
                   chunk.num_elems * reducer_.wire_bytes());
      }
    }
    exchange.publish_filled(step);
  }
  return static_cast<uint64_t>(num_steps);
}

uint64_t AllReduce::ring(Exchange& exchange) const {
  const int next = schedule::next_rank(rank_, world_size_);
  const int previous = schedule::previous_rank(rank_, world_size_);
  const int num_steps = schedule::ring_num_steps(world_size_);
  const uint64_t piece_elems =
      exchange.slot_bytes() / reducer_.hop_bytes() / kGranuleElems * kGranuleElems;
  const uint64_t rounds = num_rounds(piece_elems * static_cast<uint64_t>(world_size_));
  uint64_t slot = 0;  // numbers what this rank writes, over all rounds
  for (uint64_t round = 0; round < rounds; ++round) {
    const Range range = round_range(rounds, round);
    // Before anything has arrived, the own piece starts on its way.
    const Range first = shard_of(range, schedule::ring_step(rank_, world_size_, 0).send_piece);
    if (slot > 1) exchange.wait_filled(next, slot - 1, "ring send");
    reducer_.start_partial(data(range.begin + first.begin), exchange.own_slot(slot),
                           first.num_elems);
    exchange.publish_filled(slot);

    for (int step = 0; step < num_steps; ++step, ++slot) {
      const auto [send_piece, recv_piece, action] = schedule::ring_step(rank_, world_size_, step);
      const Range piece = shard_of(range, recv_piece);
      const bool is_last = step == num_steps - 1;  // nobody needs the last piece any more
      std::byte* own = data(range.begin + piece.begin);
      std::byte* to_next = exchange.own_slot(slot + 1);

      exchange.wait_filled(previous, slot, "ring receive");
      if (!is_last) exchange.wait_filled(next, slot, "ring send");
      const std::byte* received = exchange.slot(previous, slot);
      switch (action) {
        case schedule::RingAction::kReduce:
          reducer_.add_to_partial(received, own, to_next, piece.num_elems);
          break;
        case schedule::RingAction::kFinish:
          reducer_.finish_partial(received, own, to_next, piece.num_elems);
          break;
        case schedule::RingAction::kCopy:
          reducer_.unpack(received, own, piece.num_elems);
          if (!is_last) copy_bytes(to_next, received, piece.num_elems * reducer_.wire_bytes());
          break;
      }
      if (!is_last) exchange.publish_filled(slot + 1);
    }
  }
  return slot;
}

bool is_direct(schedule::Algorithm algorithm) {
  return algorithm == schedule::Algorithm::kOneShot || algorithm == schedule::Algorithm::kTwoShot;
}

}  // namespace

std::optional<uint64_t> message_bytes(const AllReduceArgs& args) {
  if (!is_direct(args.algorithm)) return std::nullopt;
  return args.num_elems * info(args.wire).num_bytes;
}

void contribute(const AllReduceArgs& args, const Mailboxes& mailboxes) {
  const AllReduce all_reduce(args, mailboxes.rank(), mailboxes.world_size());
  if (args.algorithm == schedule::Algorithm::kOneShot) {
    all_reduce.contribute_all(all_reduce.whole(), mailboxes.own());
  } else {
    all_reduce.contribute_shards(all_reduce.whole(), mailboxes.own());
  }
}

uint64_t complete(const AllReduceArgs& args, const Mailboxes& mailboxes, Exchange& exchange) {
  const AllReduce all_reduce(args, mailboxes.rank(), mailboxes.world_size());
  const auto slot_of = [&](int peer) { return mailboxes.of(peer); };
  if (args.algorithm == schedule::Algorithm::kOneShot) {
    all_reduce.reduce_all(all_reduce.whole(), slot_of);
    return 0;
  }
  all_reduce.reduce_shard(all_reduce.whole(), slot_of);
  exchange.publish_drained(0);
  all_reduce.collect_shards(all_reduce.whole(), mailboxes.own(), 0, exchange);
  return 1;
}

uint64_t run_rounds(const AllReduceArgs& args, Exchange& exchange) {
  const AllReduce all_reduce(args, exchange.rank(), exchange.world_size());
  switch (args.algorithm) {
    case schedule::Algorithm::kOneShot:
      return all_reduce.one_shot(exchange);
    case schedule::Algorithm::kTwoShot:
      return all_reduce.two_shot(exchange);
    case schedule::Algorithm::kOrderedRing:
      return all_reduce.ordered_ring(exchange);
    case schedule::Algorithm::kRing:
      return all_reduce.ring(exchange);
  }
  return 0;
}

}  // namespace rota::cpu
