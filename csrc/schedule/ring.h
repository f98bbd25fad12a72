// Ring schedules: who sends which shard to the next rank, in which step, and in how many rounds.
// Integers only.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace rota::schedule {

HOST_DEVICE constexpr int next_rank(int rank, int world_size) { return (rank + 1) % world_size; }
HOST_DEVICE constexpr int previous_rank(int rank, int world_size) {
  return (rank + world_size - 1) % world_size;
}

// What a rank does with the shard that arrives from the previous rank.
enum class RingAction : uint8_t {
  kReduce,  // add this rank's contribution; the result is sent on in the next step
  kFinish,  // add this rank's contribution; the sum is complete: round it, keep it, send it on
  kCopy,    // a complete sum: keep it and send it on
};

struct RingStep {
  int send_shard;  // in [0, world_size); written for the next rank to read
  int recv_shard;  // in [0, world_size); read from the previous rank
  RingAction action;
};

HOST_DEVICE constexpr int ring_num_steps(int world_size) { return 2 * (world_size - 1); }

// One rank's work at `step` of the classic ring all-reduce, step in [0,
// ring_num_steps(world_size)). The first world_size-1 steps reduce-scatter, the others all-gather.
// Shard p is complete on rank (p - 1) mod world_size, so its sum starts at rank p and goes around
// the ring: the order differs from shard to shard. Each rank sends 2*(world_size-1)/world_size *
// num_bytes (Patarasuk & Yuan 2009).
HOST_DEVICE constexpr RingStep ring_step(int rank, int world_size, int step) {
  const int send = (rank + 2 * world_size - step) % world_size;
  const int recv = (send + world_size - 1) % world_size;
  const int last_reduce = world_size - 2;
  const RingAction action = step < last_reduce    ? RingAction::kReduce
                            : step == last_reduce ? RingAction::kFinish
                                                  : RingAction::kCopy;
  return {send, recv, action};
}

// The classic ring cuts the whole tensor into world_size shards, and round r runs all steps once
// for chunk r of every shard. So the rank where an element's sum starts depends on num_elems,
// world_size and the granule (a constant of the element loops), not on the chunk length: any slot
// size and any number of channels give the same bits.

// The ordered ring keeps ascending rank order: every chunk's sum starts at rank 0 and is complete
// on the last rank, and the result then goes around the ring once. In `step` a rank reads what the
// previous rank wrote in step - 1. Partial sums and results overlap: each link carries 2 *
// num_bytes in num_chunks + 2*(world_size-1) steps, the last of which only reads.
struct OrderedRingStep {
  int64_t partial_chunk;  // sum of ranks [0, rank), to which this rank adds its own; -1: none
  int64_t result_chunk;  // complete sum to keep, and send on unless the next rank made it; -1: none
};

HOST_DEVICE constexpr int64_t ordered_ring_num_steps(int world_size, int64_t num_chunks) {
  return num_chunks + 2 * (world_size - 1);
}

HOST_DEVICE constexpr OrderedRingStep ordered_ring_step(int rank, int world_size,
                                                        int64_t num_chunks, int64_t step) {
  const int64_t partial = step - rank;
  const int64_t result = step - world_size - rank;
  const bool has_partial = partial >= 0 && partial < num_chunks;
  const bool has_result = rank < world_size - 1 && result >= 0 && result < num_chunks;
  return {has_partial ? partial : -1, has_result ? result : -1};
}

}  // namespace rota::schedule
