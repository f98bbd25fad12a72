// What a collective's kernel is told of its data; of the other ranks it is told in cuda/peers.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/limits.h"
#include "cuda/scalar.h"

namespace rota::cuda {

// What every collective is told of its data. Tensors are in the wire format.
struct CollectiveArgs {
  std::byte* input[kMaxLocalRanks];   // by place among the launch's local ranks
  std::byte* output[kMaxLocalRanks];  // may be the input
  uint64_t num_elems;
  uint64_t shard_elems;  // of each rank's shard; where there are none, of the whole
  uint64_t chunk_elems;  // what a slot takes
  uint64_t num_chunks;   // of the longest shard
  int group_size;        // ranks whose contributions are summed before groups are
  bool is_aligned;       // all tensors and shards, to 16 bytes
  ReduceOp op;
  double divisor;     // kAvg: of the sum
  double reciprocal;  // 1 / divisor where that is exact, else 0
  Rounding rounding;
  int source;       // broadcast: the root; transfer: who sends
  int destination;  // transfer: who receives
  // Of what all ranks are to call: where two ranks' differ, a kernel gives up. Replays of a CUDA
  // graph pass no code of the host that could compare what ranks call.
  uint64_t fingerprint;
};

// Every rank's tensor, mapped by this rank; the own one is input and output.
struct MappedTensors {
  std::byte* of[kMaxWorldSize];  // by rank
};

}  // namespace rota::cuda
