// The ordered ring: partial sums go from rank 0 to the last rank in the accumulate dtype, so ranks
// are added in ascending order, and results go around the ring from there. Both overlap: the
// message of a step carries a partial sum in the first half of its slot and a result in the second.
// A channel has 2 * (world_size - 1) more waits in a row than chunks.
#pragma once

#include "cuda/links.h"
#include "cuda/sources.h"
#include "schedule/ring.h"

namespace rota::cuda {

template <typename Codec, typename Block>
HOST_DEVICE void ordered_ring(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const Links links(block, peers, args);
  const Elements<Codec, Block> elements(block, args);
  const int rank = links.rank();
  const int world_size = links.world_size();
  const int next = schedule::next_rank(rank, world_size);
  const int previous = schedule::previous_rank(rank, world_size);
  const LinkSet to_next = links.open(schedule::only(next));
  const LinkSet from_previous = links.open(schedule::only(previous));
  const size_t half_slot = peers.geometry.slot_bytes / 2;

  // This channel's chunks are block.index(), block.index() + block.num_blocks(), ...
  const auto channel = static_cast<uint64_t>(block.index());
  const auto num_channels = static_cast<uint64_t>(block.num_blocks());
  const uint64_t num_chunks =
      args.num_chunks > channel ? schedule::ceil_div(args.num_chunks - channel, num_channels) : 0;
  const auto chunk_of = [&](int64_t i) {
    return schedule::chunk_of(args.num_elems, args.chunk_elems,
                              channel + static_cast<uint64_t>(i) * num_channels);
  };

  const auto chunks = static_cast<int64_t>(num_chunks);
  const int64_t num_steps = chunks == 0 ? 0 : schedule::ordered_ring_num_steps(world_size, chunks);
  for (int64_t i = 0; i < num_steps; ++i) {
    const auto step = static_cast<uint64_t>(i);
    const auto [partial, result] = schedule::ordered_ring_step(rank, world_size, chunks, i);
    const LinkSet from = i == 0 ? LinkSet{} : from_previous;
    const LinkSet to = i == num_steps - 1 ? LinkSet{} : to_next;
    if (!links.wait(ToRead{from, step - 1}, ToSend{to, step})) return;
    std::byte* received = links.incoming(previous, step - 1);
    std::byte* slot = links.outgoing(next, step);

    if (partial >= 0) {
      const Range chunk = chunk_of(partial);
      const auto own = [&](int) { return elements.input(chunk); };
      const auto to_next = [&](int) { return slot; };
      const auto kept_and_sent = [&](int index) {
        return index == 0 ? elements.output(chunk) : elements.in_slot(slot + half_slot, chunk);
      };
      const PartialAndOwn sum(elements, received, elements.input(chunk));
      if (rank == 0) {
        elements.reduce(chunk, Contributions(elements, 1, own),
                        PartialResults(elements, 1, to_next));
      } else if (rank < world_size - 1) {
        elements.reduce(chunk, sum, PartialResults(elements, 1, to_next));
      } else {
        elements.reduce(chunk, sum, Results(elements, chunk.begin, 2, kept_and_sent));
      }
    }
    if (result >= 0) {
      const Range chunk = chunk_of(result);
      const auto kept_and_sent = [&](int index) {
        return index == 0 ? elements.output(chunk) : elements.in_slot(slot + half_slot, chunk);
      };
      // The last rank made the result, so its predecessor need not send it on.
      elements.copy(chunk, elements.in_slot(received + half_slot, chunk),
                    next == world_size - 1 ? 1 : 2, kept_and_sent);
    }
    block.sync();
    links.publish(to, step);
    links.release(from, step - 1);
  }
  const uint64_t num_messages = num_steps == 0 ? 0 : static_cast<uint64_t>(num_steps) - 1;
  links.count_sent(to_next, num_messages);
  links.count_received(from_previous, num_messages);
}

}  // namespace rota::cuda
