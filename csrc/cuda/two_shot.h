// two_shot: every rank sends its contribution to each shard to the shard's owner; the owner sums
// the contributions in ascending rank order and sends the result to all. Two waits in a row for
// each chunk; each rank sends 2 * (world_size - 1) / world_size * num_bytes. Its halves are also
// separate collectives: reduce_scatter and all_gather.
#pragma once

#include "cuda/links.h"
#include "cuda/sources.h"
#include "schedule/direct.h"

namespace rota::cuda {

// The operations of two_shot among the ranks of a set, each of which owns one shard of the tensor.
// Chunk i of all shards is worked on at the same time.
template <typename Codec, typename Block>
class Shards {
 public:
  HOST_DEVICE Shards(const Links<Block>& links, const Elements<Codec, Block>& elements,
                     const RankSet& ranks)
      : links_(links), elements_(elements), ranks_(ranks) {}

  HOST_DEVICE const RankSet& ranks() const { return ranks_; }
  // Chunk i of the shard that a rank owns.
  HOST_DEVICE Range chunk_of(int owner, uint64_t i) const {
    const CollectiveArgs& args = elements_.args();
    return schedule::chunk_of_shard(args.num_elems, args.shard_elems, ranks_.place_of(owner),
                                    args.chunk_elems, i);
  }
  HOST_DEVICE Range own_chunk(uint64_t i) const { return chunk_of(links_.rank(), i); }
  HOST_DEVICE int num_peers() const { return ranks_.num_ranks - 1; }
  // The other ranks. Each rank starts at its successor, so that writers spread over the ranks.
  HOST_DEVICE int peer(int index) const {
    const int own_place = ranks_.place_of(links_.rank());
    return ranks_.rank_at(schedule::rotated_peer(own_place, ranks_.num_ranks, index));
  }

  // Sends each owner this rank's contribution to its chunk.
  HOST_DEVICE void scatter(uint64_t i, uint64_t message) const {
    elements_.copy_each(num_peers(), [&](int index) {
      const Range chunk = chunk_of(peer(index), i);
      return Copy{elements_.input(chunk),
                  elements_.in_slot(links_.outgoing(peer(index), message), chunk),
                  elements_.length_of(chunk)};
    });
  }
  // Where rank number `place` has put its contribution to this rank's chunk.
  HOST_DEVICE WirePlace contribution(int place, const Range& chunk, uint64_t message) const {
    const int rank = ranks_.rank_at(place);
    return rank == links_.rank() ? elements_.input(chunk)
                                 : elements_.in_slot(links_.incoming(rank, message), chunk);
  }
  // Where the result of this rank's chunk goes: to its own output, then to every peer's slot.
  HOST_DEVICE WirePlace result_place(int index, const Range& chunk, uint64_t message) const {
    return index == 0 ? elements_.output(chunk)
                      : elements_.in_slot(links_.outgoing(peer(index - 1), message), chunk);
  }
  // The place in a tensor that holds only this rank's shard.
  HOST_DEVICE WirePlace in_own_shard(std::byte* base, const Range& own) const {
    const CollectiveArgs& args = elements_.args();
    const Range shard =
        schedule::shard_of(args.num_elems, args.shard_elems, ranks_.place_of(links_.rank()));
    return elements_.at(base, shard.num_elems, own.begin - shard.begin);
  }
  // Copies the results of the other ranks' chunks to the output.
  HOST_DEVICE void collect(uint64_t i, uint64_t message) const {
    elements_.copy_each(num_peers(), [&](int index) {
      const Range chunk = chunk_of(peer(index), i);
      return Copy{elements_.in_slot(links_.incoming(peer(index), message), chunk),
                  elements_.output(chunk), elements_.length_of(chunk)};
    });
  }

 private:
  using Copy = typename Elements<Codec, Block>::Copy;

  const Links<Block>& links_;
  const Elements<Codec, Block>& elements_;
  RankSet ranks_;
};

template <typename Codec, Sums kSums, typename Block>
HOST_DEVICE void two_shot(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const Links links(block, peers, args);
  const Elements<Codec, Block> elements(block, args);
  const RankSet everyone = schedule::everyone(links.world_size());
  const Shards shards(links, elements, everyone);

  uint64_t message = 0;
  for (uint64_t i = block.index(); i < args.num_chunks; i += block.num_blocks(), message += 2) {
    const Range own = shards.own_chunk(i);
    const uint64_t contribution = message;
    const uint64_t result = message + 1;

    // The links are opened again where a wait hides the load: if the counts were kept during the
    // copies and the sum, they would take registers that those need.
    const LinkSet to_owners = links.open(everyone);
    if (!links.wait(ToSend{to_owners, contribution})) return;
    shards.scatter(i, contribution);
    block.sync();
    links.publish(to_owners, contribution);

    // The arrival also frees the slots of the results: a peer sends this contribution after it has
    // read all earlier messages.
    if (!links.wait(ToRead{links.open(everyone), contribution})) return;
    const auto contribution_of = [&](int rank) {
      return shards.contribution(rank, own, contribution);
    };
    const auto result_places = [&](int index) { return shards.result_place(index, own, result); };
    elements.template reduce_all<kSums>(
        own, Contributions(elements, links.world_size(), contribution_of),
        Results(elements, own.begin, links.world_size(), result_places));
    const LinkSet peers_links = links.open(everyone);
    block.sync();
    links.publish(peers_links, result);
    links.release(peers_links, contribution);

    if (!links.wait(ToRead{peers_links, result})) return;
    shards.collect(i, result);
  }
  // Results are released for later launches only: in this launch, the next contribution implies it.
  const LinkSet world = links.open(everyone);
  block.sync();
  links.release(world, message - 1);
  links.count_sent(world, message);
  links.count_received(world, message);
}

}  // namespace rota::cuda
