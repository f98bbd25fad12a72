// Reduce-scatter: each rank sums its part of all ranks' inputs, in the call's order. As in
// all_reduce, whose bits its part has, contributions and the sum are rounded to the wire dtype
// once.
#include "base/limits.h"
#include "cpu/element_loops.h"
#include "cpu/executor.h"
#include "cpu/float_environment.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"
#include "schedule/sum_order.h"

namespace rota::cpu {
namespace {

using schedule::Range;

bool is_plain(const Call& call) { return call.wire.dtype == call.dtype; }

// Elements that are rounded, summed and widened at a time, while they stay in the caches.
constexpr uint64_t kRoundedElems = 256;
struct alignas(64) RoundedBlock {
  // A wire dtype other than the tensor's is no wider than this.
  std::byte bytes[kRoundedElems * sizeof(float)];
};

std::byte* elem_at(const Call& call, const Part& part, uint64_t elem) {
  return at(part, elem * info(call.dtype).num_bytes);
}

void pack(const Call& call, const Part& part, const Range& range, std::byte* wire,
          SlotStores& stores) {
  const std::byte* src = elem_at(call, part, range.begin);
  if (is_plain(call)) return stores.store(wire, src, call.wire.payload_bytes(range.num_elems));
  element_loops().convert(call.dtype, call.wire.dtype)(src, wire, range.num_elems);
}

// Where a rank's contribution to a range lies: in the wire dtype, or in the tensor's.
struct Contribution {
  const std::byte* data;
  bool is_packed;
};

// Sums a range of this rank's part.
template <typename ContributionOf>
void reduce_part(const Call& call, const Buffers& buffers, const Range& range, int world_size,
                 ContributionOf contribution_of) {
  const IeeeFloatScope ieee;
  const ElementLoops& loops = element_loops();
  const ReduceFn reduce = loops.reduce(call.wire.dtype, call.op);
  const auto ranks = static_cast<size_t>(world_size);
  const void* srcs[kMaxWorldSize];
  const schedule::Additions additions(call.order, world_size);
  const Summands<const void*> summands{srcs, world_size, additions.of_ranks()};
  if (is_plain(call)) {
    for (size_t i = 0; i < ranks; ++i) srcs[i] = contribution_of(static_cast<int>(i)).data;
    return reduce(summands, elem_at(call, *buffers.outputs, range.begin), range.num_elems,
                  world_size);
  }
  const ConvertFn round = loops.convert(call.dtype, call.wire.dtype);
  const ConvertFn widen = loops.convert(call.wire.dtype, call.dtype);
  Contribution contributions[kMaxWorldSize];
  for (size_t i = 0; i < ranks; ++i) contributions[i] = contribution_of(static_cast<int>(i));
  RoundedBlock rounded[kMaxWorldSize], sums;
  for (uint64_t begin = 0; begin < range.num_elems; begin += kRoundedElems) {
    const uint64_t num_elems = schedule::min_of(kRoundedElems, range.num_elems - begin);
    for (size_t i = 0; i < ranks; ++i) {
      const auto [data, is_packed] = contributions[i];
      if (is_packed) {
        srcs[i] = data + call.wire.payload_bytes(begin);
      } else {
        round(data + begin * info(call.dtype).num_bytes, rounded[i].bytes, num_elems);
        srcs[i] = rounded[i].bytes;
      }
    }
    reduce(summands, sums.bytes, num_elems, world_size);
    widen(sums.bytes, elem_at(call, *buffers.outputs, range.begin + begin), num_elems);
  }
}

class ReduceScatter final : public Executor {
 public:
  // A message holds the parts of all others.
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers& buffers, int world_size,
                                        uint64_t) const override {
    return static_cast<uint64_t>(world_size - 1) * longest_packed(call, buffers, world_size);
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    const IeeeFloatScope ieee;
    const int world_size = mailboxes.world_size();
    const uint64_t longest = longest_packed(call, buffers, world_size);
    for (int owner = 0; owner < world_size; ++owner) {
      if (owner == mailboxes.rank()) continue;  // read from the tensor instead
      const Part& part = buffers.inputs[owner];
      pack(call, part, {0, part.num_elems}, mailboxes.part(mailboxes.rank(), owner, longest),
           mailboxes.stores_in_exchange_with(owner));
    }
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    const int rank = mailboxes.rank();
    const uint64_t longest = longest_packed(call, buffers, mailboxes.world_size());
    const Range whole{0, buffers.outputs->num_elems};
    reduce_part(call, buffers, whole, mailboxes.world_size(), [&](int peer) -> Contribution {
      if (peer == rank) return {at(buffers.inputs[rank], 0), false};
      return {mailboxes.part(peer, rank, longest), true};
    });
    return 0;
  }

  // Peers can read an input that is one tensor. They do not read what this rank may overwrite, its
  // own part.
  Source source_of(const Call& call, const Buffers& buffers, int, int world_size) const override {
    if (!are_one_tensor(call, buffers.inputs, world_size)) return {};
    return {.kind = Source::Kind::kTensor, .tensor = buffers.inputs->data};
  }

  uint64_t source_bytes(const Call& call, const Buffers& buffers, int,
                        int world_size) const override {
    return total_of(call, buffers.inputs, world_size);
  }

  // Each rank reads its part from all tensors. Rounding what it reads costs less than packing it
  // into slots, which would write and read it once more.
  uint64_t run_in_place(const Call& call, const Buffers& buffers, const Sources& sources,
                        Exchange& exchange) const override {
    const int rank = exchange.rank();
    const std::byte* own = at(buffers.inputs[rank], 0);
    const auto offset = own - at(*buffers.inputs, 0);
    const Range whole{0, buffers.outputs->num_elems};
    reduce_part(call, buffers, whole, exchange.world_size(), [&](int peer) -> Contribution {
      if (peer == rank) return {own, false};
      return {sources[static_cast<size_t>(peer)] + offset, false};
    });
    exchange.publish_drained(0);
    exchange.wait_drained_by_peers(0, "reduce_scatter in place");
    return 1;
  }

  // Two slots suffice, as for all-gather (copy_collectives.cpp).
  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const IeeeFloatScope ieee;
    const int rank = exchange.rank();
    const int world_size = exchange.world_size();
    const uint64_t round_elems = call.wire.capacity(exchange.share_of_slot(), 1);
    const uint64_t num_rounds = schedule::ceil_div(longest_packed(call, buffers, world_size),
                                                   call.wire.payload_bytes(round_elems));
    const auto chunk_of = [&](int owner, uint64_t round) {
      return schedule::chunk_of(buffers.inputs[owner].num_elems, round_elems, round);
    };
    exchange.let_slots_change_hands();
    for (uint64_t round = 0; round < num_rounds; ++round) {
      for (int i = 0; i < world_size - 1; ++i) {
        const int owner = schedule::rotated_peer(rank, world_size, i);
        pack(call, buffers.inputs[owner], chunk_of(owner, round),
             exchange.share(rank, owner, round), exchange.stores_to(owner));
      }
      exchange.publish_filled(round);
      exchange.wait_filled_by_peers(round, "reduce_scatter");
      const Range own = chunk_of(rank, round);
      reduce_part(call, buffers, own, world_size, [&](int peer) -> Contribution {
        if (peer == rank) return {elem_at(call, buffers.inputs[rank], own.begin), false};
        return {exchange.share(peer, rank, round), true};
      });
    }
    return num_rounds;
  }

 private:
  // The bytes of the longest part in the wire dtype.
  static uint64_t longest_packed(const Call& call, const Buffers& buffers, int world_size) {
    return call.wire.payload_bytes(longest_of(call, buffers.inputs, world_size) /
                                   info(call.dtype).num_bytes);
  }
};

}  // namespace

constexpr ReduceScatter kReduceScatterExecutor;
const Executor& reduce_scatter_executor = kReduceScatterExecutor;

}  // namespace rota::cpu
