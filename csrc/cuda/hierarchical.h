// Hierarchical all-reduce in groups of group_size consecutive ranks: a reduce-scatter in each
// group, a sum across groups of the shard that a rank owns, and an all-gather in each group. Ranks
// are added in ascending order within a group, then groups in ascending order. Three waits in a row
// for each chunk; a rank sends 2 * (group_size - 1) / group_size * num_bytes within its group, and
// to other groups (num_groups - 1) partial sums of its shard in the accumulate dtype.
//
// Each phase is a separate function, because between hosts another engine sums across groups: it
// takes the first phase's partial sum and passes its result to the third.
#pragma once

#include "cuda/two_shot.h"

namespace rota::cuda {

template <typename Codec, typename Block>
class Hierarchy {
 public:
  HOST_DEVICE Hierarchy(const Block& block, const Links<Block>& links,
                        const Elements<Codec, Block>& elements)
      : block_(block),
        links_(links),
        elements_(elements),
        group_(schedule::group_of(links.rank(), elements.args().group_size)),
        across_(
            schedule::across_groups(links.rank(), links.world_size(), elements.args().group_size)),
        shards_(links, elements, group_) {}

  // Round i of a channel sends two messages on the links within the group, and one on those across
  // groups. Every phase returns false if a wait was given up. Each opens its links again: if the
  // counts of both sets were kept, they would take registers that the sums need.

  // Writes the group's sum of chunk `chunk` of this rank's shard into the slots of the shard's
  // owner in every group, this rank included.
  HOST_DEVICE bool reduce_in_group(uint64_t chunk, uint64_t round) const {
    const LinkSet group = links_.open(group_), across = links_.open(across_);
    const uint64_t message = 2 * round;
    const Range own = shards_.own_chunk(chunk);
    if (!links_.wait(ToSend{group, message})) return false;
    shards_.scatter(chunk, message);
    block_.sync();
    links_.publish(group, message);

    if (!links_.wait(ToRead{group, message}, ToSend{across, round})) return false;
    const auto contribution_of = [&](int place) {
      return shards_.contribution(place, own, message);
    };
    const auto slot_of = [&](int place) { return links_.outgoing(across_.rank_at(place), round); };
    elements_.reduce(own, Contributions(elements_, group_.num_ranks, contribution_of),
                     PartialResults(elements_, across_.num_ranks, slot_of));
    block_.sync();
    links_.publish(across, round);
    links_.release(group, message);
    return true;
  }

  // Adds up the groups' sums and sends the result to the group.
  HOST_DEVICE bool sum_across_groups(uint64_t chunk, uint64_t round) const {
    const LinkSet group = links_.open(group_), across = links_.open(across_);
    const Range own = shards_.own_chunk(chunk);
    if (!links_.wait(ToRead{across, round})) return false;
    const auto partial_of = [&](int place) {
      return links_.incoming(across_.rank_at(place), round);
    };
    const auto result_places = [&](int index) {
      return shards_.result_place(index, own, 2 * round + 1);
    };
    elements_.reduce(own, Partials(elements_, across_.num_ranks, partial_of),
                     Results(elements_, own.begin, group_.num_ranks, result_places));
    block_.sync();
    links_.publish(group, 2 * round + 1);
    links_.release(across, round);
    return true;
  }

  HOST_DEVICE bool gather_in_group(uint64_t chunk, uint64_t round) const {
    const uint64_t message = 2 * round + 1;
    if (!links_.wait(ToRead{links_.open(group_), message})) return false;
    shards_.collect(chunk, message);
    return true;
  }

  // After the last round: updates the counts for later launches. Results are released only here; in
  // earlier rounds the next round's contribution implies the release.
  HOST_DEVICE void finish(uint64_t num_rounds) const {
    const LinkSet group = links_.open(group_), across = links_.open(across_);
    block_.sync();
    links_.release(group, 2 * num_rounds - 1);
    links_.count_sent(group, 2 * num_rounds);
    links_.count_received(group, 2 * num_rounds);
    links_.count_sent(across, num_rounds);
    links_.count_received(across, num_rounds);
  }

 private:
  const Block& block_;
  const Links<Block>& links_;
  const Elements<Codec, Block>& elements_;
  RankSet group_;
  RankSet across_;
  Shards<Codec, Block> shards_;
};

template <typename Codec, typename Block>
HOST_DEVICE void hierarchical(const Block& block, const Peers& peers, const CollectiveArgs& args) {
  const Links links(block, peers, args);
  const Elements<Codec, Block> elements(block, args);
  const Hierarchy hierarchy(block, links, elements);

  uint64_t round = 0;
  for (uint64_t i = block.index(); i < args.num_chunks; i += block.num_blocks(), ++round) {
    if (!hierarchy.reduce_in_group(i, round)) return;
    if (!hierarchy.sum_across_groups(i, round)) return;
    if (!hierarchy.gather_in_group(i, round)) return;
  }
  hierarchy.finish(round);
}

}  // namespace rota::cuda
