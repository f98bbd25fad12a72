// two_shot without slots, where ranks map each other's tensors: the owner of a shard reads it from
// every tensor and writes the result to every tensor. Nothing is moved twice: ranks of one GPU read
// and write each tensor once, which is the least there is. Over a connection a rank reads
// (world_size - 1) / world_size * num_bytes and writes as much; two waits in a row altogether.
//
// Where all ranks are local ones of one launch, nobody waits for anybody: the links stay as they
// are, and there may be more blocks than channels, and than are resident together.
#pragma once

#include "cuda/two_shot.h"

namespace rota::cuda {

template <typename Codec, typename Block>
HOST_DEVICE void two_shot_in_place(const Block& block, const Peers& peers,
                                   const CollectiveArgs& args, const MappedTensors& tensors) {
  const Links links(block, peers, args.fingerprint);
  const Elements<Codec, Block> elements(block, args);
  const RankSet everyone = schedule::everyone(links.world_size());
  const Shards shards(links, elements, everyone);

  // Messages without slots: my tensor is there; my results are.
  constexpr uint64_t kReady = 0, kDone = 1;
  const bool is_one_launch = peers.are_all_local();
  const LinkSet world = is_one_launch ? LinkSet{} : links.open(everyone);
  if (!is_one_launch) {
    if (!links.wait(ToSend{world, kReady})) return;
    links.publish(world, kReady);
    if (!links.wait(ToRead{world, kReady})) return;
  }
  for (uint64_t i = block.index(); i < args.num_chunks; i += block.num_blocks()) {
    const Range own = shards.own_chunk(i);
    const auto place_in = [&](int rank) {
      return elements.at(tensors.of[rank], args.num_elems, own.begin);
    };
    const auto place_at = [&](int index) {
      return place_in(schedule::rotated_peer(links.rank(), links.world_size(), index));
    };
    elements.reduce_in_groups(own, Contributions(elements, links.world_size(), place_in),
                              args.group_size,
                              Results(elements, own.begin, links.world_size(), place_at));
  }
  if (is_one_launch) return;
  block.sync();
  links.publish(world, kDone);
  if (!links.wait(ToRead{world, kDone})) return;
  links.release(world, kDone);
  links.count_sent(world, kDone + 1);
  links.count_received(world, kDone + 1);
}

}  // namespace rota::cuda
