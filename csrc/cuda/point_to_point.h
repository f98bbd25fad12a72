// Moves bytes from one rank to others: a transfer, or a broadcast as a chain of transfers along the
// ring. One wait in a row for each chunk, and for broadcast world_size - 2 more; no rank sends more
// than num_bytes.
#pragma once

#include "cuda/links.h"
#include "cuda/sources.h"
#include "schedule/ring.h"

namespace rota::cuda {

using Bytes = Codec<DType::kUInt8>;

// One rank's part in a chain: a rank without from_rank sends its own data; any other receives data
// and sends it on to to_rank, if there is one. from_rank, to_rank: one rank or nobody.
template <typename Block>
HOST_DEVICE void pass_on(const Block& block, const Peers& peers, const CollectiveArgs& args,
                         const RankSet& from_rank, const RankSet& to_rank) {
  const Links links(block, peers, args);
  const LinkSet from = links.open(from_rank);
  const LinkSet to = links.open(to_rank);
  const Elements<Bytes, Block> elements(block, args);
  const bool is_source = from_rank.num_ranks == 0;

  uint64_t message = 0;
  for (uint64_t i = block.index(); i < args.num_chunks; i += block.num_blocks(), ++message) {
    const Range chunk = schedule::chunk_of(args.num_elems, args.chunk_elems, i);
    if (!links.wait(ToRead{from, message}, ToSend{to, message})) return;
    const WirePlace source =
        is_source ? elements.input(chunk)
                  : elements.in_slot(links.incoming(from_rank.first, message), chunk);
    // A source has its data already.
    const int first_place = is_source ? 1 : 0;
    elements.copy(chunk, source, 1 + to_rank.num_ranks - first_place, [&](int index) {
      return index + first_place == 0
                 ? elements.output(chunk)
                 : elements.in_slot(links.outgoing(to_rank.first, message), chunk);
    });
    block.sync();
    links.publish(to, message);
    links.release(from, message);
  }
  links.count_sent(to, message);
  links.count_received(from, message);
}

// From args.source to args.destination; other ranks do nothing.
template <typename Block>
HOST_DEVICE void transfer(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const int rank = peers.rank_of(block);
  if (rank == args.source) {
    pass_on(block, peers, args, schedule::nobody(), schedule::only(args.destination));
  } else if (rank == args.destination) {
    pass_on(block, peers, args, schedule::only(args.source), schedule::nobody());
  }
}

template <typename Block>
HOST_DEVICE void broadcast(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const int rank = peers.rank_of(block);
  const int root = args.source;
  const int next = schedule::next_rank(rank, peers.world_size());
  const int previous = schedule::previous_rank(rank, peers.world_size());
  pass_on(block, peers, args, rank == root ? schedule::nobody() : schedule::only(previous),
          next == root ? schedule::nobody() : schedule::only(next));
}

}  // namespace rota::cuda
