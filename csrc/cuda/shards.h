// The two halves of two_shot as separate collectives: reduce_scatter gives each rank the result of
// its shard, all_gather gives each rank every shard. One wait in a row for each chunk; each rank
// sends (world_size - 1) / world_size of the whole tensor. All shards have the same length.
#pragma once

#include "cuda/two_shot.h"

namespace rota::cuda {

// input: all shards; output: this rank's. args.num_elems counts the input.
template <typename Codec, Sums kSums, typename Block>
HOST_DEVICE void reduce_scatter(const Block& block, const Peers& peers,
                                const CollectiveArgs& args) {
  const Links links(block, peers, args);
  const Elements<Codec, Block> elements(block, args);
  const LinkSet world = links.open(schedule::everyone(links.world_size()));
  const Shards shards(links, elements, world.ranks);

  uint64_t message = 0;
  for (uint64_t i = block.index(); i < args.num_chunks; i += block.num_blocks(), ++message) {
    const Range own = shards.own_chunk(i);

    if (!links.wait(ToSend{world, message})) return;
    shards.scatter(i, message);
    block.sync();
    links.publish(world, message);

    if (!links.wait(ToRead{world, message})) return;
    const auto contribution_of = [&](int rank) { return shards.contribution(rank, own, message); };
    const auto output = [&](int) { return shards.in_own_shard(elements.own_output(), own); };
    elements.template reduce_all<kSums>(
        own, Contributions(elements, links.world_size(), contribution_of),
        Results(elements, own.begin, 1, output));
    block.sync();
    links.release(world, message);
  }
  links.count_sent(world, message);
  links.count_received(world, message);
}

// input: this rank's shard; output: all. args.num_elems counts the output.
template <typename Codec, typename Block>
HOST_DEVICE void all_gather(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const Links links(block, peers, args);
  const Elements<Codec, Block> elements(block, args);
  const RankSet everyone = schedule::everyone(links.world_size());
  const Shards shards(links, elements, everyone);

  uint64_t message = 0;
  for (uint64_t i = block.index(); i < args.num_chunks; i += block.num_blocks(), ++message) {
    const Range own = shards.own_chunk(i);

    // The links are opened again for each wait, as in one_shot: 64 registers let two blocks share a
    // multiprocessor.
    const LinkSet to_peers = links.open(everyone);
    if (!links.wait(ToSend{to_peers, message})) return;
    elements.copy(own, shards.in_own_shard(elements.own_input(), own), links.world_size(),
                  [&](int index) { return shards.result_place(index, own, message); });
    block.sync();
    links.publish(to_peers, message);

    if (!links.wait(ToRead{links.open(everyone), message})) return;
    shards.collect(i, message);
    block.sync();
    links.release(links.open(everyone), message);
  }
  const LinkSet world = links.open(everyone);
  links.count_sent(world, message);
  links.count_received(world, message);
}

}  // namespace rota::cuda
