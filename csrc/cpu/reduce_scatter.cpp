// Reduce-scatter: each rank sums its part of all ranks' inputs, in the canonical order and with one
// rounding, so that its part has the bits of all_reduce.
#include "cpu/copy.h"
#include "cpu/element_loops.h"
#include "cpu/executor.h"
#include "cpu/float_environment.h"
#include "cpu/parts.h"
#include "schedule/chunk.h"
#include "schedule/direct.h"

namespace rota::cpu {
namespace {

using schedule::Range;

// Sums a range of this rank's part, in bytes, which source_of(peer) has at its start.
template <typename SourceOf>
void reduce_part(const Call& call, const Buffers& buffers, const Range& range, int rank,
                 int world_size, SourceOf source_of) {
  const IeeeFloatScope ieee;
  const void* srcs[kMaxWorldSize];
  for (int peer = 0; peer < world_size; ++peer) {
    srcs[peer] = peer == rank ? at(buffers.inputs[rank], range.begin) : source_of(peer);
  }
  element_loops().reduce(call.dtype, call.op)(srcs, world_size, at(*buffers.outputs, range.begin),
                                              range.num_elems / info(call.dtype).num_bytes,
                                              world_size);
}

class ReduceScatter final : public Executor {
 public:
  // A message holds the parts of all ranks, each at a multiple of the longest one's length.
  std::optional<uint64_t> message_bytes(const Call& call, const Buffers& buffers, int world_size,
                                        uint64_t) const override {
    return static_cast<uint64_t>(world_size) * longest_of(call, buffers.inputs, world_size);
  }

  void contribute(const Call& call, const Buffers& buffers,
                  const Mailboxes& mailboxes) const override {
    const int world_size = mailboxes.world_size();
    const uint64_t stride = longest_of(call, buffers.inputs, world_size);
    for (int owner = 0; owner < world_size; ++owner) {
      if (owner == mailboxes.rank()) continue;  // read from the tensor instead
      const Part& part = buffers.inputs[owner];
      copy_bytes(mailboxes.own() + static_cast<uint64_t>(owner) * stride, part.data,
                 bytes_of(call, part));
    }
  }

  uint64_t complete(const Call& call, const Buffers& buffers, const Mailboxes& mailboxes,
                    Exchange&) const override {
    const int rank = mailboxes.rank();
    const uint64_t offset =
        static_cast<uint64_t>(rank) * longest_of(call, buffers.inputs, mailboxes.world_size());
    reduce_part(call, buffers, {0, bytes_of(call, *buffers.outputs)}, rank, mailboxes.world_size(),
                [&](int peer) { return mailboxes.of(peer) + offset; });
    return 0;
  }

  // Two slots suffice, as for all-gather (copy_collectives.cpp).
  uint64_t run_rounds(const Call& call, const Buffers& buffers, Exchange& exchange) const override {
    const int rank = exchange.rank();
    const int world_size = exchange.world_size();
    const uint64_t share = exchange.share_of_slot();
    const uint64_t num_rounds =
        schedule::ceil_div(longest_of(call, buffers.inputs, world_size), share);
    const auto chunk_of = [&](int owner, uint64_t round) {
      return schedule::chunk_of(bytes_of(call, buffers.inputs[owner]), share, round);
    };
    for (uint64_t round = 0; round < num_rounds; ++round) {
      for (int i = 0; i < world_size - 1; ++i) {
        const int owner = schedule::rotated_peer(rank, world_size, i);
        const Range chunk = chunk_of(owner, round);
        copy_bytes(exchange.own_slot(round) + static_cast<uint64_t>(owner) * share,
                   at(buffers.inputs[owner], chunk.begin), chunk.num_elems);
      }
      exchange.publish_filled(round);
      exchange.wait_filled_by_peers(round, "reduce_scatter");
      reduce_part(call, buffers, chunk_of(rank, round), rank, world_size, [&](int peer) {
        return exchange.slot(peer, round) + static_cast<uint64_t>(rank) * share;
      });
    }
    return num_rounds;
  }
};

}  // namespace

const Executor& reduce_scatter_executor() {
  static const ReduceScatter executor;
  return executor;
}

}  // namespace rota::cpu
