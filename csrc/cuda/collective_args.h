// A kernel's arguments about a collective's data; cuda/peers.h has those about the other ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/limits.h"
#include "base/wire_format.h"
#include "cuda/scalar.h"
#include "cuda/sums.h"

namespace rota::cuda {

// What output has of results that can be NaN (cuda/spoil.h).
enum class OutputFloats : uint8_t { kNone, kAllShards, kOneShard };

// Tensors are in the wire format.
struct CollectiveArgs {
  std::byte* input[kMaxLocalRanks];   // by place among the launch's local ranks
  std::byte* output[kMaxLocalRanks];  // may be the input
  WireFormat format;
  OutputFloats output_floats;
  uint64_t num_elems;
  uint64_t shard_elems;  // of each shard; of the whole tensor if it has no shards
  uint64_t chunk_elems;  // of each chunk; fits in a slot
  uint64_t num_chunks;   // of the longest shard
  int group_size;        // kInGroups: ranks summed as a group, before groups are summed
  TreeAdditions tree;    // kInTree
  bool is_aligned;       // all tensors and shards, to 16 bytes
  ReduceOp op;
  double divisor;     // kAvg: divides the sum
  double reciprocal;  // 1 / divisor where that is exact, else 0
  Rounding rounding;
  int source;       // broadcast: the root; transfer: who sends; others: no rank
  int destination;  // transfer: who receives
  // Identifies the call: a kernel gives up if two ranks' fingerprints differ. Replays of a CUDA
  // graph run no host code that could compare calls.
  uint64_t fingerprint;
};

// Every rank's tensor, mapped by this rank; this rank's own is input and output.
struct MappedTensors {
  std::byte* of[kMaxWorldSize];  // by rank
};

}  // namespace rota::cuda
