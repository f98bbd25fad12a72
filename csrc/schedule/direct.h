// Direct schedules: every rank reads every other rank's slots. Integers only.
//
//   one_shot  everybody reads everything: 1 stage, (world_size-1) * num_bytes read per rank
//   two_shot  each rank reduces its shard, then collects the others': 2 stages,
//             2*(world_size-1)/world_size * num_bytes read per rank
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace rota::schedule {

// What a rank does at `step` of a pipelined two-shot over num_rounds rounds, in this order:
// contribute, reduce, collect. Rounds are -1 where there is nothing to do.
//
// Round r is contributed one step ahead of being reduced, so that peers find it when they come to
// it. Why two slots suffice: a rank contributes round r+2 after it collected round r, for which it
// waited until every peer had reduced round r, and with that had read and written its slot for the
// last time.
struct TwoShotStep {
  int64_t contribute_round;
  int64_t reduce_round;
};

HOST_DEVICE constexpr int64_t two_shot_num_steps(int64_t num_rounds) { return num_rounds + 1; }

HOST_DEVICE constexpr TwoShotStep two_shot_step(int64_t num_rounds, int64_t step) {
  return {step < num_rounds ? step : -1, step - 1};
}

// The peer that `rank` reads as number `index` in [0, world_size-1): each starts at its successor,
// so that readers do not meet at one rank. Loads rotate; additions never do. Index world_size-1 is
// the rank itself.
HOST_DEVICE constexpr int rotated_peer(int rank, int world_size, int index) {
  const int peer = rank + 1 + index;
  return peer < world_size ? peer : peer - world_size;  // a remainder takes a GPU 30 instructions
}

}  // namespace rota::schedule
