// two_shot without slots, for ranks that map each other's tensors: the owner of a shard reads it
// from every tensor and writes the result to every tensor. No data is moved twice: ranks on one GPU
// read and write each tensor once, which is the minimum. Between GPUs a rank reads (world_size - 1)
// / world_size * num_bytes and writes as much; two waits in a row altogether.
//
// If all ranks are local ranks of one launch, no block waits for another: the links are not used,
// and there may be more blocks than channels, and than can be resident together.
#pragma once

#include "cuda/two_shot.h"

namespace rota::cuda {

template <typename Codec, Sums kSums, typename Block>
HOST_DEVICE void two_shot_in_place(const Block& block, const Peers& peers,
                                   const CollectiveArgs& args, const MappedTensors& tensors) {
  const Links links(block, peers, args);
  const Elements<Codec, Block> elements(block, args);
  const RankSet everyone = schedule::everyone(links.world_size());
  const Shards shards(links, elements, everyone);

  // Messages without slots: this rank's tensor is ready; its results are written.
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
    elements.template reduce_all<kSums>(own, Contributions(elements, links.world_size(), place_in),
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
