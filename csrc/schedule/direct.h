// Direct schedules: every rank reads every other rank's slots. Integers only.
//
//   one_shot  every rank reads all contributions: 1 stage, (world_size-1) * num_bytes read per rank
//   two_shot  each rank reduces its shard, then collects the others: 2 stages,
//             2*(world_size-1)/world_size * num_bytes read per rank
#pragma once

#include <compare>
#include <cstdint>

#include "base/host_device.h"

namespace rota::schedule {

// What a rank does at `step` of a pipelined two-shot over num_rounds rounds, in this order:
// contribute, reduce, collect. A round is -1 if there is nothing to do.
//
// Round r is contributed one step before it is reduced, so peers find it when they need it. Two
// slots suffice: a rank contributes round r+2 only after it has collected round r. To collect, it
// waited until every peer had reduced round r, and by then each peer had read and written this
// rank's slot for the last time.
struct TwoShotStep {
  int64_t contribute_round;
  int64_t reduce_round;
};

HOST_DEVICE constexpr int64_t two_shot_num_steps(int64_t num_rounds) { return num_rounds + 1; }

HOST_DEVICE constexpr TwoShotStep two_shot_step(int64_t num_rounds, int64_t step) {
  return {step < num_rounds ? step : -1, step - 1};
}

// The peer that `rank` accesses as number `index` in [0, world_size-1). Each rank starts at its
// successor, so that readers spread over the ranks. Only loads rotate, never additions. Index
// world_size-1 is the rank itself.
HOST_DEVICE constexpr int rotated_peer(int rank, int world_size, int index) {
  const int peer = rank + 1 + index;
  return peer < world_size ? peer : peer - world_size;  // a remainder takes a GPU 30 instructions
}

// The index at which rotated_peer() gives this peer.
constexpr int index_of_peer(int rank, int world_size, int peer) {
  const int index = peer - rank - 1;
  return index < 0 ? index + world_size : index;
}

// Where many pairs of ranks have transfers, every rank queues those of step 0 first, then those of
// step 1: at each it receives from source_at() and sends to rotated_peer(). A transfer has one step
// on both of its ends, and several of one step and one link keep their order. So of all unfinished
// transfers the first has both ends at the head of their queues, and no circle of ranks waits for
// each other. That holds for a GPU with one hardware queue, too (CUDA_DEVICE_MAX_CONNECTIONS=1),
// where a kernel that waits for another of its stream holds up all that is queued behind it.
constexpr int source_at(int rank, int world_size, int step) {
  const int source = rank - 1 - step;
  return source < 0 ? source + world_size : source;
}

struct TransferTurn {
  int step;
  int64_t index;  // among the transfers from the source to the destination
  bool is_send;   // the other end of the transfer, at another rank, has the same step and index

  auto operator<=>(const TransferTurn&) const = default;
};

inline TransferTurn turn_of_transfer(int world_size, int source, int destination, int64_t index,
                                     bool is_send) {
  return {
      .step = index_of_peer(source, world_size, destination), .index = index, .is_send = is_send};
}

}  // namespace rota::schedule
