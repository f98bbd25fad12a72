// The classic ring (Patarasuk & Yuan 2009): every shard's sum goes once around the ring in the
// accumulate dtype, then its result once more in the wire dtype. 2 * (world_size - 1) waits in a
// row for each chunk; each rank sends (world_size - 1) / world_size of the tensor in each of the
// two dtypes, to its successor only. Each shard's sum starts at a different rank: see
// schedule/ring.h.
#pragma once

#include "cuda/links.h"
#include "cuda/sources.h"
#include "schedule/ring.h"

namespace rota::cuda {

template <typename Codec, typename Block>
HOST_DEVICE void ring(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const Links links(block, peers, args);
  const Elements<Codec, Block> elements(block, args);
  const int rank = links.rank();
  const int world_size = links.world_size();
  const int next = schedule::next_rank(rank, world_size);
  const int previous = schedule::previous_rank(rank, world_size);
  const LinkSet to_next = links.open(schedule::only(next));
  const LinkSet from_previous = links.open(schedule::only(previous));
  const int num_steps = schedule::ring_num_steps(world_size);

  uint64_t message = 0;  // number of the message that arrives; the one sent on is the next
  for (uint64_t round = block.index(); round < args.num_chunks; round += block.num_blocks()) {
    const auto chunk_of = [&](int shard) {
      return schedule::chunk_of_shard(args.num_elems, args.shard_elems, shard, args.chunk_elems,
                                      round);
    };
    // Before anything has arrived, this rank sends its own shard.
    const Range first = chunk_of(schedule::ring_step(rank, world_size, 0).send_shard);
    if (!links.wait(ToSend{to_next, message})) return;
    const auto own_first = [&](int) { return elements.input(first); };
    const auto first_slot = [&](int) { return links.outgoing(next, message); };
    elements.reduce(first, Contributions(elements, 1, own_first),
                    PartialResults(elements, 1, first_slot));
    block.sync();
    links.publish(to_next, message);

    for (int step = 0; step < num_steps; ++step, ++message) {
      const auto [send_shard, recv_shard, action] = schedule::ring_step(rank, world_size, step);
      const Range chunk = chunk_of(recv_shard);
      // In the last step nobody needs the shard any more.
      const LinkSet to = step == num_steps - 1 ? LinkSet{} : to_next;
      if (!links.wait(ToRead{from_previous, message}, ToSend{to, message + 1})) return;

      std::byte* received = links.incoming(previous, message);
      std::byte* slot = links.outgoing(next, message + 1);
      const auto to_next = [&](int) { return slot; };
      const auto kept_and_sent = [&](int index) {
        return index == 0 ? elements.output(chunk) : elements.in_slot(slot, chunk);
      };
      const PartialAndOwn sum(elements, received, elements.input(chunk));
      switch (action) {
        case schedule::RingAction::kReduce:
          elements.reduce(chunk, sum, PartialResults(elements, 1, to_next));
          break;
        case schedule::RingAction::kFinish:
          elements.reduce(chunk, sum, Results(elements, chunk.begin, 2, kept_and_sent));
          break;
        case schedule::RingAction::kCopy:
          elements.copy(chunk, elements.in_slot(received, chunk), 1 + to.ranks.num_ranks,
                        kept_and_sent);
          break;
      }
      block.sync();
      links.publish(to, message + 1);
      links.release(from_previous, message);
    }
  }
  links.count_sent(to_next, message);
  links.count_received(from_previous, message);
}

}  // namespace rota::cuda
