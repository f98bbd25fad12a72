// one_shot: every rank sends its whole tensor to every other rank and computes the whole sum
// itself, in ascending rank order. One wait in a row for each chunk; each rank sends (world_size -
// 1) * num_bytes.
#pragma once

#include "cuda/links.h"
#include "cuda/sources.h"
#include "schedule/direct.h"

namespace rota::cuda {

template <typename Codec, Sums kSums, typename Block>
HOST_DEVICE void one_shot(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const Links links(block, peers, args);
  const Elements<Codec, Block> elements(block, args);
  const RankSet everyone = schedule::everyone(links.world_size());
  const int num_peers = links.world_size() - 1;

  uint64_t message = 0;
  for (uint64_t i = block.index(); i < args.num_chunks; i += block.num_blocks(), ++message) {
    const Range chunk = schedule::chunk_of(args.num_elems, args.chunk_elems, i);

    // The links are opened again for each wait, which hides the load, and after the sum: if the
    // counts were kept during the sum, they would take registers that it needs.
    const LinkSet to_peers = links.open(everyone);
    if (!links.wait(ToSend{to_peers, message})) return;
    elements.copy(chunk, elements.input(chunk), num_peers, [&](int index) {
      const int peer = schedule::rotated_peer(links.rank(), links.world_size(), index);
      return elements.in_slot(links.outgoing(peer, message), chunk);
    });
    block.sync();
    links.publish(to_peers, message);

    if (!links.wait(ToRead{links.open(everyone), message})) return;
    const auto contribution_of = [&](int rank) {
      return rank == links.rank() ? elements.input(chunk)
                                  : elements.in_slot(links.incoming(rank, message), chunk);
    };
    const auto output = [&](int) { return elements.output(chunk); };
    elements.template reduce_all<kSums>(
        chunk, Contributions(elements, links.world_size(), contribution_of),
        Results(elements, chunk.begin, 1, output));
    block.sync();
    links.release(links.open(everyone), message);
  }
  const LinkSet world = links.open(everyone);
  links.count_sent(world, message);
  links.count_received(world, message);
}

}  // namespace rota::cuda
