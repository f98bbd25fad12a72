#include "cuda/launch_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/random_bits.h"
#include "cuda/launch_checks.h"
#include "schedule/chunk.h"

namespace rota::cuda {
namespace {

// The shards that a tensor is cut into before it is cut into chunks.
int num_shards(const LaunchRequest& request, int world_size, int group_size) {
  switch (request.kernel) {
    case Kernel::kTwoShot:
    case Kernel::kTwoShotInPlace:
    case Kernel::kRing:
    case Kernel::kReduceScatter:
    case Kernel::kAllGather:
      return world_size;
    case Kernel::kHierarchical:
      return group_size;
    case Kernel::kLowLatency:
    case Kernel::kOneShot:
    case Kernel::kOrderedRing:
    case Kernel::kBroadcast:
    case Kernel::kTransfer:
      return 1;
  }
  return 1;
}

// two_shot_in_place of local ranks waits for nothing: their tensors are ready before the launch,
// and their results when it ends.
bool waits(const LaunchRequest& request, const Peers& peers) {
  return request.kernel != Kernel::kTwoShotInPlace || !peers.are_all_local();
}

// Whether slots also take partial sums, in the accumulate dtype.
bool sends_partials(Kernel kernel) {
  return kernel == Kernel::kRing || kernel == Kernel::kOrderedRing ||
         kernel == Kernel::kHierarchical;
}

// world_size: check_launch() has let it pass.
TreeAdditions tree_additions(int world_size) {
  const schedule::SumOrder order{.num_shards = std::bit_ceil(static_cast<uint32_t>(world_size))};
  TreeAdditions additions{};
  for (int rank = 0; rank < world_size; ++rank) {
    const int num = schedule::num_additions(order, world_size, rank);
    additions.of_ranks |= static_cast<uint64_t>(num) << (rank * TreeAdditions::kBits);
  }
  return additions;
}

OutputFloats output_floats_of(const LaunchRequest& request) {
  if (!request.moves_floats && !has_nan(request.format.dtype)) return OutputFloats::kNone;
  return request.kernel == Kernel::kReduceScatter ? OutputFloats::kOneShard
                                                  : OutputFloats::kAllShards;
}

constexpr int kNoRank = -1;

// Whether kernels may move 16 bytes at a time: everything starts at a multiple of 16 bytes.
bool is_everything_aligned(const LaunchRequest& request, const Peers& peers) {
  bool are_aligned = true;
  for (const void* tensor : request.input) are_aligned &= is_aligned(tensor, kAccessBytes);
  for (const void* tensor : request.output) are_aligned &= is_aligned(tensor, kAccessBytes);
  if (has_equal_shards(request.kernel)) {
    const auto num_ranks = static_cast<uint64_t>(peers.world_size());
    are_aligned &= request.format.num_bytes(request.num_elems / num_ranks) % kAccessBytes == 0;
  }
  for (int rank = 0; request.tensors != nullptr && rank < peers.world_size(); ++rank) {
    are_aligned &= is_aligned(request.tensors->of[rank], kAccessBytes);
  }
  return are_aligned;
}

// The most elements that a message takes; a multiple of granule_elems.
uint64_t message_capacity(const LaunchRequest& request, const transport::DeviceGeometry& geometry,
                          uint64_t granule_elems) {
  constexpr uint64_t kMostElems = uint64_t{1} << 31;  // kernels count elements in 32 bits
  if (request.kernel == Kernel::kTwoShotInPlace) return kMostElems;  // it needs no slots
  size_t num_bytes = geometry.slot_bytes;
  if (request.kernel == Kernel::kOrderedRing) num_bytes = geometry.slot_bytes / 2;
  if (request.kernel == Kernel::kLowLatency) num_bytes = geometry.packet_bytes / 2;  // half is data
  uint64_t capacity = request.format.capacity(num_bytes, granule_elems);
  if (sends_partials(request.kernel)) {
    const WireFormat partials{info(request.format.dtype).accumulate};
    capacity = std::min(capacity, partials.capacity(num_bytes, granule_elems));
  }
  check_capacity(request, geometry, capacity, granule_elems);
  return std::min(capacity, kMostElems);
}

}  // namespace

Kernel kernel_for(schedule::Algorithm algorithm) {
  switch (algorithm) {
    case schedule::Algorithm::kOneShot:
      return Kernel::kOneShot;
    case schedule::Algorithm::kTwoShot:
      return Kernel::kTwoShot;
    case schedule::Algorithm::kOrderedRing:
      return Kernel::kOrderedRing;
    case schedule::Algorithm::kRing:
      return Kernel::kRing;
    case schedule::Algorithm::kLowLatency:
      return Kernel::kLowLatency;
    case schedule::Algorithm::kTwoLevel:
      break;  // refused by Planner
  }
  __builtin_unreachable();
}

void set_order(LaunchRequest& request, const schedule::SumOrder& order, int world_size) {
  if (order.num_shards != 0) check_adds_in_tree(request.kernel);
  const std::optional<int> group_size = schedule::as_groups(order, world_size);
  request.group_size = group_size.value_or(0);
  // Integers have the same sum in any order.
  const bool needs_tree = !group_size && info(request.format.dtype).is_floating;
  request.sums = needs_tree ? Sums::kInTree : Sums::kInGroups;
}

bool is_packed(const Call& call) {
  const bool is_plain_reduction =
      call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter;
  return call.kind == CollectiveKind::kReduceBucket || call.encodes_parts() ||
         (is_plain_reduction && call.wire != WireFormat{call.dtype});
}

Rounding rounding_of(const Call& call, int stream) {
  return {.is_stochastic = call.pass.stochastic_seed.has_value(),
          .seed = call.pass.stochastic_seed.value_or(0),
          .stream = static_cast<uint64_t>(stream)};
}

LaunchRequest request_for(const Call& call, int world_size) {
  const auto reduction = [&](Kernel kernel, uint64_t num_elems) -> LaunchRequest {
    // Shards of a reduce_scatter are equally long, so they are not cut at tiles.
    const bool is_bucket = is_packed(call) && kernel != Kernel::kReduceScatter;
    const uint64_t num_tiles = schedule::ceil_div(num_elems, kTileElems);
    LaunchRequest request{.kernel = kernel,
                          .num_elems = is_bucket ? num_tiles * kTileElems : num_elems,
                          .format = call.wire,
                          .op = call.op,
                          .divisor = call.pass.divisor,
                          .is_bucket = is_bucket,
                          .rounding = rounding_of(call, kResultStream)};
    set_order(request, call.order, world_size);
    return request;
  };
  const auto copy = [&](Kernel kernel, uint64_t num_bytes) -> LaunchRequest {
    return {.kernel = kernel,
            .num_elems = num_bytes,
            .format = kBytes,
            .moves_floats = has_nan(call.dtype),
            .source = call.root};
  };
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
    case CollectiveKind::kReduceBucket:
    case CollectiveKind::kReduce:
      return reduction(kernel_for(call.algorithm), call.num_elems);
    case CollectiveKind::kReduceScatter:
      return reduction(Kernel::kReduceScatter, static_cast<uint64_t>(world_size) * call.num_elems);
    case CollectiveKind::kBroadcast:
      return copy(Kernel::kBroadcast, call.num_bytes());
    case CollectiveKind::kAllGather:
      return copy(Kernel::kAllGather, static_cast<uint64_t>(world_size) * call.num_bytes());
    case CollectiveKind::kSendRecv:
      return copy(Kernel::kTransfer, call.num_bytes());
    case CollectiveKind::kReduceShards:
    case CollectiveKind::kUpdateShards:
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kBarrier:
      break;
  }
  refuse_launch(call.kind_name(), " has no kernel");
}

LaunchPlan plan_launch(const LaunchRequest& request, const Peers& peers,
                       const schedule::Tuning& tuning) {
  check_launch(request, peers);
  const int world_size = peers.world_size();
  const int group_size = group_size_of(request, peers);
  LaunchPlan plan{
      .args = {.input = {},
               .output = {},
               .format = request.format,
               .output_floats = output_floats_of(request),
               .num_elems = request.num_elems,
               .group_size = group_size,
               .tree = request.sums == Sums::kInTree ? tree_additions(world_size) : TreeAdditions{},
               .op = request.op,
               .divisor = request.divisor,
               .rounding = request.rounding,
               .source = has_source(request.kernel) ? request.source : kNoRank,
               .destination = request.destination,
               .fingerprint = request.fingerprint},
      .num_blocks = 0,
      .num_threads = most_threads(request.sums),
      .waits = waits(request, peers)};
  if (request.num_elems == 0) return plan;
  check_tensors(request, peers);

  CollectiveArgs& args = plan.args;
  for (size_t place = 0; place < kMaxLocalRanks; ++place) {
    args.input[place] = static_cast<std::byte*>(request.input[place]);
    args.output[place] = static_cast<std::byte*>(request.output[place]);
  }
  int exponent = 0;
  if (std::frexp(request.divisor, &exponent) == 0.5) args.reciprocal = 1 / request.divisor;
  args.is_aligned = is_everything_aligned(request, peers);
  const uint64_t granule_elems = request.is_bucket ? kTileElems : kGranuleElems;

  args.shard_elems = schedule::shard_length(
      request.num_elems, static_cast<uint64_t>(num_shards(request, world_size, group_size)),
      has_equal_shards(request.kernel) ? 1 : granule_elems);
  const uint64_t longest_elems = std::min(args.shard_elems, request.num_elems);
  if (!plan.waits) {
    args.chunk_elems = request.format.capacity(tuning.free_chunk_bytes, granule_elems);
    args.num_chunks = schedule::ceil_div(longest_elems, args.chunk_elems);
    plan.num_blocks = static_cast<int>(args.num_chunks);
    plan.num_threads = std::min(tuning.free_threads, most_threads(request.sums));
    return plan;
  }

  // Chunks are as long as a message may be, or short enough that every channel has one, but not
  // shorter than what a block moves at once.
  const auto num_channels = static_cast<uint64_t>(peers.geometry.num_channels);
  const uint64_t at_once =
      static_cast<uint64_t>(plan.num_threads) * kAccessBytes / info(request.format.dtype).num_bytes;
  const uint64_t share = std::max(schedule::ceil_div(longest_elems, num_channels), at_once);
  args.chunk_elems = schedule::ceil_div(share, granule_elems) * granule_elems;
  args.chunk_elems =
      std::min(args.chunk_elems, message_capacity(request, peers.geometry, granule_elems));
  args.num_chunks = schedule::ceil_div(longest_elems, args.chunk_elems);
  if (request.kernel == Kernel::kLowLatency && args.num_chunks > num_channels) {
    refuse_launch("low_latency takes up to ",
                  num_channels * message_capacity(request, peers.geometry, granule_elems),
                  " elements of ", name(request.format.dtype), ", got ", request.num_elems,
                  "; use one_shot or two_shot");
  }
  plan.num_blocks = static_cast<int>(std::min(args.num_chunks, num_channels));
  return plan;
}

}  // namespace rota::cuda
