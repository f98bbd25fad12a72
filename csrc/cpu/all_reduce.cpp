// All-reduce, of plain tensors and of gradient buckets, and reduce, which is an all-reduce whose
// sum only the root receives.
#include "base/limits.h"
#include "cpu/bucket_reducer.h"
#include "cpu/copy.h"
#include "cpu/executor.h"
#include "cpu/float_environment.h"
#include "cpu/reducer.h"
#include "cpu/two_level.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"
#include "schedule/ring.h"

namespace rota::cpu {
namespace {

using schedule::Range;

// One all-reduce in flight, with the arithmetic of a Reducer or a BucketReducer. The stages of the
// direct algorithms get each rank's slot from slot_of(rank), because one-message calls run the same
// stages on mailboxes.
template <typename AnyReducer>
class AllReduce {
 public:
  AllReduce(const AnyReducer& reducer, const Call& call, int rank, int world_size)
      : reducer_(reducer),
        num_elems_(call.num_elems),
        rank_(rank),
        world_size_(world_size),
        receivers_(row_of(call.kind).receivers),
        root_(call.root) {}

  uint64_t one_shot(Exchange& exchange) const;
  uint64_t two_shot(Exchange& exchange) const;
  uint64_t two_shot_in_place(const Sources& sources, Exchange& exchange) const;
  uint64_t ordered_ring(Exchange& exchange) const;
  uint64_t ring(Exchange& exchange) const;

  Range whole() const { return {0, num_elems_}; }
  // one_shot: each rank contributes the whole range; receivers reduce all of it from every rank's
  // slot.
  void contribute_all(const Range& range, std::byte* own_slot) const {
    reducer_.pack(range, wire().place(own_slot, range.num_elems));
  }
  template <typename SlotOf>
  void reduce_all(const Range& range, SlotOf slot_of) const;
  // two_shot: each rank contributes the other ranks' shards, reduces its own shard from every
  // rank's slot and writes the sum back into the receivers'; they collect the other shards from
  // their own slots.
  void contribute_shards(const Range& range, std::byte* own_slot) const;
  template <typename SlotOf>
  void reduce_shard(const Range& range, SlotOf slot_of) const;
  void collect_shards(const Range& range, std::byte* own_slot, uint64_t round,
                      Exchange& exchange) const;

 private:
  static constexpr uint64_t kGranuleElems = AnyReducer::kGranuleElems;

  const WireFormat& wire() const { return reducer_.wire(); }
  // Where a shard lies in the slot of its round.
  WirePlace place_of(const Range& shard, std::byte* slot, const Range& round) const {
    return wire().from(wire().place(slot, round.num_elems), shard.begin);
  }

  // Rounds of equal length, at most round_elems each.
  uint64_t num_rounds(uint64_t round_elems) const {
    return schedule::ceil_div(num_elems_, round_elems);
  }
  static Range in_tensor(const Range& round, const Range& shard) {
    return {round.begin + shard.begin, shard.num_elems};
  }
  Range round_range(uint64_t num_rounds, uint64_t round) const {
    return schedule::even_shard(num_elems_, num_rounds, round, kGranuleElems);
  }
  uint64_t hop_capacity(size_t num_bytes) const {
    return num_bytes / reducer_.hop_bytes() / kGranuleElems * kGranuleElems;
  }
  // The shard's begin counts from the start of the round.
  Range shard_of(const Range& round, int owner) const {
    return schedule::even_shard(round.num_elems, static_cast<uint64_t>(world_size_),
                                static_cast<uint64_t>(owner), kGranuleElems);
  }

  bool is_receiver(int rank) const { return is_among(receivers_, rank, root_); }

  const AnyReducer& reducer_;
  uint64_t num_elems_;
  int rank_;
  int world_size_;
  Ranks receivers_;
  int root_;
};

template <typename AnyReducer>
template <typename SlotOf>
void AllReduce<AnyReducer>::reduce_all(const Range& range, SlotOf slot_of) const {
  if (!is_receiver(rank_)) return;
  WirePlace srcs[kMaxWorldSize];
  for (int peer = 0; peer < world_size_; ++peer) {
    srcs[peer] = wire().place(slot_of(peer), range.num_elems);
  }
  srcs[rank_] = reducer_.own_source(srcs[rank_]);
  reducer_.reduce(srcs, range, {});
}

// Two slots suffice: round r + 2 overwrites the slot of round r, but only after every peer has
// filled round r + 1, which a peer does after it has read round r.
template <typename AnyReducer>
uint64_t AllReduce<AnyReducer>::one_shot(Exchange& exchange) const {
  const uint64_t rounds = num_rounds(wire().capacity(exchange.slot_bytes(), kGranuleElems));
  exchange.let_slots_change_hands();
  for (uint64_t round = 0; round < rounds; ++round) {
    const Range range = round_range(rounds, round);
    contribute_all(range, exchange.own_slot(round));
    exchange.publish_filled(round);
    exchange.wait_filled_by_peers(round, "one_shot");
    reduce_all(range, [&](int peer) { return exchange.slot(peer, round); });
  }
  return rounds;
}

template <typename AnyReducer>
void AllReduce<AnyReducer>::contribute_shards(const Range& range, std::byte* own_slot) const {
  for (int owner = 0; owner < world_size_; ++owner) {
    if (owner == rank_) continue;  // read from the tensor instead
    const Range shard = shard_of(range, owner);
    reducer_.pack(in_tensor(range, shard), place_of(shard, own_slot, range));
  }
}

template <typename AnyReducer>
template <typename SlotOf>
void AllReduce<AnyReducer>::reduce_shard(const Range& range, SlotOf slot_of) const {
  const Range shard = shard_of(range, rank_);
  WirePlace srcs[kMaxWorldSize];
  WirePlace wire_outs[kMaxWorldSize];
  size_t num_outs = 0;
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) {
      srcs[peer] = kFromTensor;
    } else {
      srcs[peer] = place_of(shard, slot_of(peer), range);
      if (is_receiver(peer)) wire_outs[num_outs++] = srcs[peer];
    }
  }
  reducer_.reduce(srcs, in_tensor(range, shard), {wire_outs, num_outs});
}

template <typename AnyReducer>
void AllReduce<AnyReducer>::collect_shards(const Range& range, std::byte* own_slot, uint64_t round,
                                           Exchange& exchange) const {
  for (int i = 0; i < world_size_ - 1; ++i) {
    const int owner = schedule::rotated_peer(rank_, world_size_, i);
    const Range shard = shard_of(range, owner);
    exchange.wait_drained(owner, round, "two_shot collect");
    if (!is_receiver(rank_)) continue;
    reducer_.unpack(place_of(shard, own_slot, range), in_tensor(range, shard));
  }
}

// schedule/direct.h explains why two slots suffice.
template <typename AnyReducer>
uint64_t AllReduce<AnyReducer>::two_shot(Exchange& exchange) const {
  const uint64_t rounds = num_rounds(wire().capacity(exchange.slot_bytes(), kGranuleElems));
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
      exchange.wait_filled_by_peers(round, "two_shot reduce");
      reduce_shard(range, [&](int peer) { return exchange.slot(peer, round); });
      exchange.publish_drained(round);
      collect_shards(range, exchange.own_slot(round), round, exchange);
    }
  }
  return rounds;
}

// Like two_shot, with tensors instead of slots: this rank reads its shard of a round from all
// tensors and writes the sum to its own, from which the others collect it. A rank writes only its
// own tensor, and overwrites another rank's shard there only after that shard's owner has read it.
// The sums are collected one step later, while they are still in the caches.
template <typename AnyReducer>
uint64_t AllReduce<AnyReducer>::two_shot_in_place(const Sources& sources,
                                                  Exchange& exchange) const {
  const auto place_of_range = [&](int peer, const Range& range) {
    return wire().from(wire().place(sources[static_cast<size_t>(peer)], num_elems_), range.begin);
  };
  const uint64_t rounds = num_rounds(wire().capacity(exchange.slot_bytes(), kGranuleElems));
  const int64_t num_steps = schedule::two_shot_num_steps(static_cast<int64_t>(rounds));
  for (int64_t step = 0; step < num_steps; ++step) {
    const auto [reduce, collect] = schedule::two_shot_step(static_cast<int64_t>(rounds), step);
    if (reduce >= 0) {
      const auto round = static_cast<uint64_t>(reduce);
      const Range range = round_range(rounds, round);
      const Range shard = in_tensor(range, shard_of(range, rank_));
      WirePlace srcs[kMaxWorldSize];
      for (int peer = 0; peer < world_size_; ++peer) srcs[peer] = place_of_range(peer, shard);
      srcs[rank_] = kFromTensor;
      reducer_.reduce(srcs, shard, {});
      exchange.publish_filled(round);
    }
    if (collect >= 0) {
      const auto round = static_cast<uint64_t>(collect);
      const Range range = round_range(rounds, round);
      for (int i = 0; i < world_size_ - 1; ++i) {
        const int owner = schedule::rotated_peer(rank_, world_size_, i);
        const Range shard = in_tensor(range, shard_of(range, owner));
        exchange.wait_filled(owner, round, "two_shot in place");
        reducer_.unpack(place_of_range(owner, shard), shard);
      }
    }
  }
  exchange.publish_drained(rounds - 1);
  exchange.wait_drained_by_peers(rounds - 1, "two_shot in place end");
  return rounds;
}

// Rings: slot i reuses the memory of slot i - 2. It is written after the next rank has filled its
// own slot i - 1, for which it has read this rank's slot i - 2.

template <typename AnyReducer>
uint64_t AllReduce<AnyReducer>::ordered_ring(Exchange& exchange) const {
  const int next = schedule::next_rank(rank_, world_size_);
  const int previous = schedule::previous_rank(rank_, world_size_);
  // Partial sums travel in the first half of a slot, results in the second.
  const size_t half_slot = exchange.slot_bytes() / 2;
  const uint64_t num_chunks = num_rounds(
      schedule::min_of(hop_capacity(half_slot), wire().capacity(half_slot, kGranuleElems)));
  const int64_t num_steps =
      schedule::ordered_ring_num_steps(world_size_, static_cast<int64_t>(num_chunks));
  for (int64_t i = 0; i < num_steps; ++i) {
    const auto step = static_cast<uint64_t>(i);
    const auto [partial, result] =
        schedule::ordered_ring_step(rank_, world_size_, static_cast<int64_t>(num_chunks), i);
    if (step > 0) exchange.wait_filled(previous, step - 1, "ordered_ring receive");
    if (step > 1) exchange.wait_filled(next, step - 1, "ordered_ring send");
    std::byte* own_results = exchange.own_slot(step) + half_slot;

    if (partial >= 0) {
      const Range chunk = round_range(num_chunks, static_cast<uint64_t>(partial));
      if (rank_ == 0) {
        reducer_.start_partial(chunk, exchange.own_slot(step));
      } else if (rank_ < world_size_ - 1) {
        reducer_.add_to_partial(exchange.slot(previous, step - 1), chunk, exchange.own_slot(step));
      } else {
        reducer_.finish_partial(exchange.slot(previous, step - 1), chunk,
                                wire().place(own_results, chunk.num_elems));
      }
    }
    if (result >= 0) {
      const Range chunk = round_range(num_chunks, static_cast<uint64_t>(result));
      std::byte* sum = exchange.slot(previous, step - 1) + half_slot;
      reducer_.unpack(wire().place(sum, chunk.num_elems), chunk);
      if (next != world_size_ - 1) copy_bytes(own_results, sum, wire().num_bytes(chunk.num_elems));
    }
    exchange.publish_filled(step);
  }
  return static_cast<uint64_t>(num_steps);
}

template <typename AnyReducer>
uint64_t AllReduce<AnyReducer>::ring(Exchange& exchange) const {
  const int next = schedule::next_rank(rank_, world_size_);
  const int previous = schedule::previous_rank(rank_, world_size_);
  const int num_steps = schedule::ring_num_steps(world_size_);
  const uint64_t chunk_elems = hop_capacity(exchange.slot_bytes());
  const uint64_t rounds =
      schedule::num_chunks_of_shards(num_elems_, world_size_, chunk_elems, kGranuleElems);
  uint64_t slot = 0;  // index of this rank's writes, counted over all rounds
  for (uint64_t round = 0; round < rounds; ++round) {
    const auto chunk_of = [&](int shard) {
      return schedule::chunk_of_even_shard(num_elems_, world_size_, shard, chunk_elems, round,
                                           kGranuleElems);
    };
    // Nothing has arrived yet: the first chunk to send is the own shard's.
    const Range first = chunk_of(schedule::ring_step(rank_, world_size_, 0).send_shard);
    if (slot > 1) exchange.wait_filled(next, slot - 1, "ring send");
    reducer_.start_partial(first, exchange.own_slot(slot));
    exchange.publish_filled(slot);

    for (int step = 0; step < num_steps; ++step, ++slot) {
      const auto [send_shard, recv_shard, action] = schedule::ring_step(rank_, world_size_, step);
      const Range chunk = chunk_of(recv_shard);
      const bool is_last = step == num_steps - 1;  // the last chunk is not forwarded
      std::byte* to_next = exchange.own_slot(slot + 1);

      exchange.wait_filled(previous, slot, "ring receive");
      if (!is_last) exchange.wait_filled(next, slot, "ring send");
      std::byte* received = exchange.slot(previous, slot);
      switch (action) {
        case schedule::RingAction::kReduce:
          reducer_.add_to_partial(received, chunk, to_next);
          break;
        case schedule::RingAction::kFinish:
          reducer_.finish_partial(received, chunk, wire().place(to_next, chunk.num_elems));
          break;
        case schedule::RingAction::kCopy:
          reducer_.unpack(wire().place(received, chunk.num_elems), chunk);
          if (!is_last) copy_bytes(to_next, received, wire().num_bytes(chunk.num_elems));
          break;
      }
      if (!is_last) exchange.publish_filled(slot + 1);
    }
  }
  return slot;
}

// Calls body(reducer) with the reducer for this call.
template <typename Body>
auto with_reducer(const Call& call, const Buffers& buffers, int rank, int world_size, Body&& body) {
  const IeeeFloatScope ieee;
  if (call.kind == CollectiveKind::kReduceBucket) {
    return body(BucketReducer(call, buffers, rank, world_size));
  }
  const bool is_receiver = is_among(row_of(call.kind).receivers, rank, call.root);
  return body(Reducer(call, buffers.data, is_receiver, world_size));
}

// Calls body(all_reduce) with that reducer.
template <typename Body>
auto with_all_reduce(const Call& call, const Buffers& buffers, int rank, int world_size,
                     Body&& body) {
  return with_reducer(call, buffers, rank, world_size, [&](const auto& reducer) {
    return body(AllReduce(reducer, call, rank, world_size));
  });
}

uint64_t run_two_level(const Call& call, const Buffers& buffers, Exchange& exchange) {
  Call of_levels = call;
  of_levels.order = schedule::order_of_blocks(call.order);
  const int rank = exchange.rank();
  const int world_size = exchange.world_size();
  return with_reducer(of_levels, buffers, rank, world_size, [&](const auto& reducer) {
    return TwoLevel(reducer, of_levels, rank, world_size).run(exchange);
  });
}

class AllReduceExecutor final : public Executor {
 public:
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers&, int,
                                        uint64_t) const override {
    if (schedule::is_ring(call.algorithm) || call.algorithm == schedule::Algorithm::kTwoLevel) {
      return std::nullopt;  // it needs steps
    }
    // Contributing updates the residual, which must wait until the ranks are known to agree.
    if (call.pass.has_residual) return std::nullopt;
    return call.wire.num_bytes(call.num_elems);
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    with_all_reduce(call, buffers, mailboxes.rank(), mailboxes.world_size(),
                    [&](const auto& all_reduce) {
                      if (call.algorithm == schedule::Algorithm::kOneShot) {
                        all_reduce.contribute_all(all_reduce.whole(), mailboxes.own());
                      } else {
                        all_reduce.contribute_shards(all_reduce.whole(), mailboxes.own());
                      }
                    });
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange& exchange) const override {
    const auto slot_of = [&](int peer) { return mailboxes.of(peer); };
    const auto finish = [&](const auto& all_reduce) -> uint64_t {
      if (call.algorithm == schedule::Algorithm::kOneShot) {
        all_reduce.reduce_all(all_reduce.whole(), slot_of);
        return 0;
      }
      all_reduce.reduce_shard(all_reduce.whole(), slot_of);
      exchange.publish_drained(0);
      all_reduce.collect_shards(all_reduce.whole(), mailboxes.own(), 0, exchange);
      return 1;
    };
    return with_all_reduce(call, buffers, mailboxes.rank(), mailboxes.world_size(), finish);
  }

  // A contribution that must be rounded or changed cannot be read from the tensor itself.
  Source source_of(const Call& call, const Buffers& buffers, int, int) const override {
    const bool is_plain = call.kind == CollectiveKind::kAllReduce &&
                          call.algorithm == schedule::Algorithm::kTwoShot &&
                          call.wire == WireFormat{call.dtype};
    if (!is_plain) return {.kind = Source::Kind::kSlots};
    return {.kind = Source::Kind::kTensor, .tensor = buffers.data};
  }

  uint64_t run_in_place(const Call& call, const Buffers& buffers, const Sources& sources,
                        Exchange& exchange) const override {
    return with_all_reduce(
        call, buffers, exchange.rank(), exchange.world_size(),
        [&](const auto& all_reduce) { return all_reduce.two_shot_in_place(sources, exchange); });
  }

  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    if (call.algorithm == schedule::Algorithm::kTwoLevel) {
      return run_two_level(call, buffers, exchange);
    }
    const auto run = [&](const auto& all_reduce) -> uint64_t {
      switch (call.algorithm) {
        case schedule::Algorithm::kOneShot:
          return all_reduce.one_shot(exchange);
        case schedule::Algorithm::kTwoShot:
          return all_reduce.two_shot(exchange);
        case schedule::Algorithm::kOrderedRing:
          return all_reduce.ordered_ring(exchange);
        case schedule::Algorithm::kRing:
          return all_reduce.ring(exchange);
        case schedule::Algorithm::kTwoLevel:
        case schedule::Algorithm::kLowLatency:
          break;  // above; refused by Planner
      }
      return 0;
    };
    return with_all_reduce(call, buffers, exchange.rank(), exchange.world_size(), run);
  }
};

}  // namespace

constexpr AllReduceExecutor kAllReduceExecutor;
const Executor& all_reduce_executor = kAllReduceExecutor;

}  // namespace rota::cpu
