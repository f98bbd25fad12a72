// Turns a request into a kernel's arguments: how the tensor is cut, how many blocks run. Refuses
// whatever the kernel does not take, before anything is launched. Host code without CUDA, so that
// it is tested on machines without a GPU.
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

// Whether a kernel is also compiled to add along a tree.
bool adds_in_tree(Kernel kernel);

// The format of collectives that only copy.
inline constexpr WireFormat kBytes{DType::kUInt8};

struct LaunchRequest {
  Kernel kernel;
  // By place among the launch's local ranks. For reduce_scatter and all_gather, num_elems counts
  // the larger tensor.
  std::array<void*, kMaxLocalRanks> input{};
  std::array<void*, kMaxLocalRanks> output{};  // the input, or separate from it
  uint64_t num_elems = 0;
  WireFormat format{DType::kFloat32};
  bool moves_floats = false;  // of kBytes: they are of a dtype that has NaN
  ReduceOp op = ReduceOp::kSum;
  double divisor = 0;  // of kAvg
  Sums sums = Sums::kInGroups;
  int group_size = 0;      // kInGroups; 0: world_size, one group
  bool is_bucket = false;  // cut at whole tiles
  Rounding rounding{};
  int source = 0;                          // broadcast: the root; transfer: who sends
  int destination = 0;                     // transfer: who receives
  const MappedTensors* tensors = nullptr;  // two_shot_in_place
  uint64_t fingerprint = 0;                // see CollectiveArgs; 0 on all ranks compares nothing
};

// Has the kernel add in this order. The request has its kernel and format.
void set_order(LaunchRequest& request, const schedule::SumOrder& order, int world_size);

// Whether the tensor is packed into a buffer in the call's wire format, in whole tiles, for the
// kernel, and unpacked afterwards.
bool is_packed(const Call& call);
// The call's rounding; if it is stochastic, with this stream of random bits (base/random_bits.h).
Rounding rounding_of(const Call& call, int stream);
// The request without the tensors, the ends of a transfer and the fingerprint. Throws for a
// barrier, which has no kernel.
LaunchRequest request_for(const Call& call, int world_size);

struct LaunchPlan {
  CollectiveArgs args;
  int num_blocks;   // of each local rank; 0: there is nothing to do
  int num_threads;  // of each block
  bool waits;       // for other blocks, so all must be resident together
};

// Throws Error(kValue), which states what was given and what is expected. `peers` has the geometry
// that follows from the tuning.
LaunchPlan plan_launch(const LaunchRequest& request, const Peers& peers,
                       const schedule::Tuning& tuning);

// Throws likewise if no kernel could use a tuning.
void check_tuning(const schedule::Tuning& tuning);

// Throws likewise for what pack and unpack do not take.
void check_bucket(const BucketArgs& args, DType dtype, const WireFormat& wire);

}  // namespace rota::cuda
