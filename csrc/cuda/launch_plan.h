// From what a caller wants of a kernel to what the kernel is told: how the tensor is cut, how many
// blocks run. Everything that a kernel does not take is refused here, before anything is launched.
// Host code without CUDA, so that it is tested on machines without a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/wire_format.h"
#include "cuda/block_threads.h"
#include "cuda/bucket_args.h"
#include "cuda/collective_args.h"
#include "cuda/peers.h"
#include "schedule/call.h"
#include "schedule/select.h"
#include "schedule/tuning.h"

namespace rota::cuda {

enum class Kernel : uint8_t {
  kLowLatency,
  kOneShot,
  kTwoShot,
  kTwoShotInPlace,
  kOrderedRing,
  kRing,
  kHierarchical,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kTransfer,
};
inline constexpr std::array<std::string_view, 11> kKernelNames{
    "low_latency",  "one_shot",       "two_shot",   "two_shot_in_place", "ordered_ring", "ring",
    "hierarchical", "reduce_scatter", "all_gather", "broadcast",         "transfer"};
constexpr std::string_view name(Kernel kernel) { return kKernelNames[static_cast<size_t>(kernel)]; }

// The kernel of an all-reduce that goes through links.
Kernel kernel_for(schedule::Algorithm algorithm);

// What is only copied is copied as bytes.
inline constexpr WireFormat kBytes{DType::kUInt8};

struct LaunchRequest {
  Kernel kernel;
  // By place among the launch's local ranks. num_elems: of the larger of both tensors, for
  // reduce_scatter and all_gather.
  std::array<void*, kMaxLocalRanks> input{};
  std::array<void*, kMaxLocalRanks> output{};  // the input, or apart from it
  uint64_t num_elems = 0;
  WireFormat format{DType::kFloat32};
  ReduceOp op = ReduceOp::kSum;
  double divisor = 0;      // of kAvg
  int group_size = 0;      // 0: world_size, one group
  bool is_bucket = false;  // cut at whole tiles
  Rounding rounding{};
  int source = 0;                          // broadcast: the root; transfer: who sends
  int destination = 0;                     // transfer: who receives
  const MappedTensors* tensors = nullptr;  // two_shot_in_place
  uint64_t fingerprint = 0;                // CollectiveArgs; the same everywhere: not compared
};

// Whether the tensor is packed into memory in the call's wire format, in whole tiles, for its
// kernel, and unpacked from there.
bool is_packed(const Call& call);
// What is rounded at random, in this stream of random bits (base/random_bits.h).
Rounding rounding_of(const Call& call, int stream);
// All but the tensors, the ends of a transfer, and the fingerprint. Not of a barrier, which has no
// kernel.
LaunchRequest request_for(const Call& call, int world_size);

struct LaunchPlan {
  CollectiveArgs args;
  int num_blocks;   // of each local rank; 0: there is nothing to do
  int num_threads;  // of each block
  bool waits;       // for other blocks: so all must be resident together
};

// Throws Error(kValue), which says what was given and what is taken. `peers` has the geometry that
// the tuning led to.
LaunchPlan plan_launch(const LaunchRequest& request, const Peers& peers,
                       const schedule::Tuning& tuning);

// Throws likewise where no kernel could work by a tuning.
void check_tuning(const schedule::Tuning& tuning);

// What pack and unpack do not take: throws likewise.
void check_bucket(const BucketArgs& args, DType dtype, const WireFormat& wire);

}  // namespace rota::cuda
