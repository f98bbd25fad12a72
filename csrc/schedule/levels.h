// How a sum in two levels is cut and paced, over the NUMA nodes of a host or over several hosts, on
// CPUs and on GPUs.
//
// A chunk is cut into a shard for each rail, and a shard into a part for each group. A group is a
// node or a host, and a rail has one rank of each group. The ranks of a group sum a shard each;
// those of a rail sum a part each over the groups and give each other the sums; those of a group
// gather the shards.
#pragma once

#include <cstdint>

#include "schedule/chunk.h"

namespace rota::schedule {

// Ranges are counted from where the chunk's range is.
struct Levels {
  int num_rails;
  int num_groups;
  uint64_t granule;

  // The last shards may be shorter or empty.
  constexpr uint64_t longest_shard(const Range& chunk) const {
    return shard_length(chunk.num_elems, static_cast<uint64_t>(num_rails), granule);
  }
  constexpr Range shard_of(const Range& chunk, int rail) const {
    return cut(chunk, num_rails, rail);
  }
  constexpr Range part_of(const Range& shard, int group) const {
    return cut(shard, num_groups, group);
  }
  // Calls body(group, part) for each part of a shard.
  template <typename Body>
  void for_each_part(const Range& shard, const Body& body) const {
    for (int group = 0; group < num_groups; ++group) body(group, part_of(shard, group));
  }

 private:
  constexpr Range cut(const Range& whole, int num_shards, int index) const {
    const Range range = even_shard(whole.num_elems, static_cast<uint64_t>(num_shards),
                                   static_cast<uint64_t>(index), granule);
    return {whole.begin + range.begin, range.num_elems};
  }
};

// A chunk's memory is used again three chunks later: one is contributed, one summed, one collected.
inline constexpr uint64_t kNumPlaces = 3;

// Runs the three steps of each chunk such that, while one chunk is exchanged, others are worked on.
template <typename Steps>
void run_in_steps(Steps& steps, uint64_t num_chunks) {
  for (uint64_t step = 0; step < num_chunks + 2; ++step) {
    if (step < num_chunks) steps.contribute(step);
    if (step >= 1 && step <= num_chunks) steps.reduce(step - 1);
    if (step >= 2) steps.collect(step - 2);
  }
}

}  // namespace rota::schedule
