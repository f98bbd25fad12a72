#include "cuda/launch_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "base/random_bits.h"
#include "schedule/chunk.h"

namespace rota::cuda {
namespace {

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw Error(ErrorKind::kValue, join("rota: ", parts...));
}

bool reduces(Kernel kernel) {
  switch (kernel) {
    case Kernel::kLowLatency:
    case Kernel::kOneShot:
    case Kernel::kTwoShot:
    case Kernel::kTwoShotInPlace:
    case Kernel::kOrderedRing:
    case Kernel::kRing:
    case Kernel::kHierarchical:
    case Kernel::kReduceScatter:
      return true;
    case Kernel::kAllGather:
    case Kernel::kBroadcast:
    case Kernel::kTransfer:
      return false;
  }
  return false;
}

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

bool has_equal_shards(Kernel kernel) {
  return kernel == Kernel::kReduceScatter || kernel == Kernel::kAllGather;
}

// Whether slots also take partial sums, in the accumulate dtype.
bool sends_partials(Kernel kernel) {
  return kernel == Kernel::kRing || kernel == Kernel::kOrderedRing ||
         kernel == Kernel::kHierarchical;
}

bool is_aligned_to(const void* address, size_t num_bytes) {
  return reinterpret_cast<uintptr_t>(address) % num_bytes == 0;
}

void check_peers(const Peers& peers, Kernel kernel) {
  const transport::DeviceGeometry& geometry = peers.geometry;
  const int least_ranks = kernel == Kernel::kOneShot ? 1 : 2;  // a single rank only rounds
  if (geometry.world_size < least_ranks || geometry.world_size > kMaxWorldSize) {
    refuse("world_size is ", geometry.world_size, ", ", name(kernel), " takes ", least_ranks,
           " to ", kMaxWorldSize);
  }
  if (peers.first_rank < 0 || peers.first_rank >= geometry.world_size) {
    refuse("rank is ", peers.first_rank, ", expected 0 to ", geometry.world_size - 1);
  }
  const int most_local_ranks = std::min(geometry.world_size - peers.first_rank, kMaxLocalRanks);
  if (peers.num_local_ranks < 1 || peers.num_local_ranks > most_local_ranks) {
    refuse("num_local_ranks is ", peers.num_local_ranks, ", expected 1 to ", most_local_ranks);
  }
  if (geometry.num_channels < 1) {
    refuse("num_channels is ", geometry.num_channels, ", expected 1 or more");
  }
  if (geometry.slot_bytes % transport::kDeviceLineBytes != 0 ||
      geometry.packet_bytes % transport::kDeviceLineBytes != 0) {
    refuse("slot_bytes is ", geometry.slot_bytes, " and packet_bytes ", geometry.packet_bytes,
           ", expected multiples of ", transport::kDeviceLineBytes);
  }
  for (int rank = 0; rank < geometry.world_size; ++rank) {
    const std::byte* region = peers.regions[rank];
    if (region == nullptr || !is_aligned_to(region, transport::kDeviceLineBytes)) {
      refuse("the region of rank ", rank, " is at ", static_cast<const void*>(region),
             ", expected an address that is a multiple of ", transport::kDeviceLineBytes);
    }
  }
  if (peers.abort == nullptr || peers.num_left == nullptr || peers.failure == nullptr ||
      peers.stall == nullptr) {
    refuse("there is no word for aborts, for ranks that left, for failures or for stalls");
  }
}

void check_adds_in_tree(Kernel kernel) {
  if (adds_in_tree(kernel)) return;
  refuse(name(kernel), " does not add along a tree; use one_shot or two_shot");
}

void check_tree(const LaunchRequest& request, const Peers& peers) {
  check_adds_in_tree(request.kernel);
  if (peers.world_size() > kMostTreeRanks) {
    refuse("world_size is ", peers.world_size(), ", kernels add along trees of up to ",
           kMostTreeRanks, " ranks");
  }
}

// world_size: check_tree() has let it pass.
TreeAdditions tree_additions(int world_size) {
  const schedule::SumOrder order{.num_shards = std::bit_ceil(static_cast<uint32_t>(world_size))};
  TreeAdditions additions{};
  for (int rank = 0; rank < world_size; ++rank) {
    const int num = schedule::num_additions(order, world_size, rank);
    additions.of_ranks |= static_cast<uint64_t>(num) << (rank * TreeAdditions::kBits);
  }
  return additions;
}

void check_arithmetic(const LaunchRequest& request, const Peers& peers, int group_size) {
  const DType dtype = request.format.dtype;
  if (!is_defined(request.op, dtype)) {
    refuse(name(request.kernel), " does not take op ", name(request.op), " of ", name(dtype));
  }
  if (request.format.is_block_scaled) {
    if (!has_block_scaling(dtype)) refuse(name(dtype), " has no block scaling");
    if (request.op != ReduceOp::kSum && request.op != ReduceOp::kAvg) {
      refuse("op is ", name(request.op), ", with block scaling sum and avg are taken");
    }
    if (request.kernel == Kernel::kLowLatency || request.kernel == Kernel::kReduceScatter) {
      refuse(name(request.kernel), " does not take block scaling; use one_shot or two_shot");
    }
  }
  if (request.op == ReduceOp::kAvg && !(std::isfinite(request.divisor) && request.divisor > 0)) {
    refuse("divisor is ", request.divisor, ", avg takes a positive finite one");
  }
  if (request.op == ReduceOp::kAvg && !info(dtype).is_floating &&
      (request.divisor != std::trunc(request.divisor) || request.divisor > INT32_MAX)) {
    refuse("divisor is ", request.divisor, ", avg of ", name(dtype),
           " takes a whole one below 2^31");
  }
  if (request.rounding.is_stochastic && !is_wire_dtype(dtype)) {
    refuse("stochastic rounding of ", name(dtype), " was asked for; it is for floats of 32 bits ",
           "and fewer");
  }
  if (group_size < 1 || peers.world_size() % group_size != 0) {
    refuse("group_size is ", group_size, ", expected a divisor of world_size ", peers.world_size());
  }
  if (request.sums == Sums::kInTree) check_tree(request, peers);
  const bool is_ring = request.kernel == Kernel::kRing || request.kernel == Kernel::kOrderedRing;
  if (is_ring && group_size != peers.world_size()) {
    refuse("group_size is ", group_size, ", but ", name(request.kernel),
           " adds ranks one after another; use hierarchical, one_shot or two_shot");
  }
}

OutputFloats output_floats_of(const LaunchRequest& request) {
  if (!request.moves_floats && !has_nan(request.format.dtype)) return OutputFloats::kNone;
  return request.kernel == Kernel::kReduceScatter ? OutputFloats::kOneShard
                                                  : OutputFloats::kAllShards;
}

// What one of the launch's local ranks does with its tensors.
struct OwnTensors {
  int rank;
  void* input;
  void* output;
  bool reads;
  bool writes;
};

OwnTensors own_tensors(const LaunchRequest& request, const Peers& peers, int place) {
  const int rank = peers.first_rank + place;
  const bool is_transfer = request.kernel == Kernel::kTransfer;
  return {.rank = rank,
          .input = request.input[static_cast<size_t>(place)],
          .output = request.output[static_cast<size_t>(place)],
          .reads = !is_transfer || rank == request.source,
          .writes = !is_transfer || rank == request.destination};
}

// In place means at this rank's shard, or at the whole tensor; any other overlap would be read half
// written.
void check_overlap(const LaunchRequest& request, const Peers& peers, const OwnTensors& own) {
  const bool has_shards = has_equal_shards(request.kernel);
  const auto num_shards = static_cast<uint64_t>(has_shards ? peers.world_size() : 1);
  const size_t whole_bytes = request.format.num_bytes(request.num_elems);
  const size_t shard_bytes = request.format.num_bytes(request.num_elems / num_shards);
  const bool is_whole_input = request.kernel != Kernel::kAllGather;
  const auto whole = reinterpret_cast<uintptr_t>(is_whole_input ? own.input : own.output);
  const auto shard = reinterpret_cast<uintptr_t>(is_whole_input ? own.output : own.input);
  const uintptr_t in_place = whole + (has_shards ? static_cast<size_t>(own.rank) * shard_bytes : 0);
  const bool are_apart = whole + whole_bytes <= shard || shard + shard_bytes <= whole;
  if (shard != in_place && !are_apart) {
    refuse("input at ", own.input, " and output at ", own.output,
           " overlap; work in place, or on tensors that lie apart");
  }
}

void check_own_tensors(const LaunchRequest& request, const Peers& peers, const OwnTensors& own) {
  const bool lacks_input = own.reads && own.input == nullptr;
  if (lacks_input || (own.writes && own.output == nullptr)) {
    refuse(name(request.kernel), " of ", request.num_elems, " elements has no ",
           lacks_input ? "input" : "output", " of rank ", own.rank);
  }
  if (own.reads && own.writes) check_overlap(request, peers, own);
  if (request.format.is_block_scaled &&
      (!is_aligned_to(own.input, kAccessBytes) || !is_aligned_to(own.output, kAccessBytes))) {
    refuse("tensors in scaled blocks start at multiples of ", kAccessBytes, " bytes, got ",
           own.input, " and ", own.output);
  }
  if (request.kernel == Kernel::kTwoShotInPlace &&
      (own.input != own.output || request.tensors->of[own.rank] != own.input)) {
    refuse("two_shot_in_place works in place, on this rank's mapped tensor");
  }
}

void check_tensors(const LaunchRequest& request, const Peers& peers) {
  if (has_equal_shards(request.kernel) &&
      request.num_elems % static_cast<uint64_t>(peers.world_size()) != 0) {
    refuse(name(request.kernel), " of ", request.num_elems, " elements among ", peers.world_size(),
           " ranks: shards are equally long, so pad to a multiple of world_size");
  }
  if (request.kernel == Kernel::kTwoShotInPlace) {
    if (request.tensors == nullptr) refuse("two_shot_in_place needs every rank's mapped tensor");
    for (int rank = 0; rank < peers.world_size(); ++rank) {
      if (request.tensors->of[rank] == nullptr)
        refuse("the tensor of rank ", rank, " is not mapped");
    }
  }
  for (int place = 0; place < peers.num_local_ranks; ++place) {
    check_own_tensors(request, peers, own_tensors(request, peers, place));
  }
}

constexpr int kNoRank = -1;

bool has_source(Kernel kernel) {
  return kernel == Kernel::kTransfer || kernel == Kernel::kBroadcast;
}

void check_ends(const LaunchRequest& request, const Peers& peers) {
  const bool is_transfer = request.kernel == Kernel::kTransfer;
  if (!has_source(request.kernel)) return;
  for (const int rank : {request.source, is_transfer ? request.destination : request.source}) {
    if (rank >= 0 && rank < peers.world_size()) continue;
    refuse(name(request.kernel), " with rank ", rank, " as an end: expected 0 to ",
           peers.world_size() - 1);
  }
  if (!is_transfer) return;
  if (request.source == request.destination) {
    refuse("transfer from rank ", request.source, " to itself; expected two ranks");
  }
  if (peers.num_local_ranks == 1 && peers.first_rank != request.source &&
      peers.first_rank != request.destination) {
    refuse("transfer from rank ", request.source, " to rank ", request.destination, " on rank ",
           peers.first_rank, ", which has no part in it");
  }
}

// Whether kernels may move 16 bytes at a time: everything starts at a multiple of 16 bytes.
bool is_everything_aligned(const LaunchRequest& request, const Peers& peers) {
  bool is_aligned = true;
  for (const void* tensor : request.input) is_aligned &= is_aligned_to(tensor, kAccessBytes);
  for (const void* tensor : request.output) is_aligned &= is_aligned_to(tensor, kAccessBytes);
  if (has_equal_shards(request.kernel)) {
    const auto num_ranks = static_cast<uint64_t>(peers.world_size());
    is_aligned &= request.format.num_bytes(request.num_elems / num_ranks) % kAccessBytes == 0;
  }
  for (int rank = 0; request.tensors != nullptr && rank < peers.world_size(); ++rank) {
    is_aligned &= is_aligned_to(request.tensors->of[rank], kAccessBytes);
  }
  return is_aligned;
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
  if (capacity == 0) {
    refuse("slot_bytes is ", geometry.slot_bytes, " and packet_bytes ", geometry.packet_bytes,
           ", too few for ", name(request.kernel), " of ", name(request.format.dtype), ": ",
           granule_elems, " elements must fit");
  }
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

bool adds_in_tree(Kernel kernel) {
  return reduces(kernel) && kernel != Kernel::kRing && kernel != Kernel::kOrderedRing &&
         kernel != Kernel::kHierarchical;
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
    case CollectiveKind::kGather:
    case CollectiveKind::kScatter:
    case CollectiveKind::kAllToAll:
    case CollectiveKind::kBarrier:
      break;
  }
  refuse(call.kind_name(), " has no kernel");
}

LaunchPlan plan_launch(const LaunchRequest& request, const Peers& peers,
                       const schedule::Tuning& tuning) {
  check_peers(peers, request.kernel);
  const int world_size = peers.world_size();
  const int group_size = request.group_size == 0 ? world_size : request.group_size;
  if (reduces(request.kernel)) check_arithmetic(request, peers, group_size);
  check_ends(request, peers);
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
    refuse("low_latency takes up to ",
           num_channels * message_capacity(request, peers.geometry, granule_elems), " elements of ",
           name(request.format.dtype), ", got ", request.num_elems, "; use one_shot or two_shot");
  }
  plan.num_blocks = static_cast<int>(std::min(args.num_chunks, num_channels));
  return plan;
}

void check_tuning(const schedule::Tuning& tuning) {
  if (tuning.num_channels < 0) {
    refuse("num_channels is ", tuning.num_channels,
           ", expected 0 for all that are resident, or more");
  }
  // Less would not hold the granule of every kernel and dtype; kernels cannot count more.
  constexpr size_t kLeastBytes = 4096, kMostBytes = size_t{1} << 30;
  const auto check_bytes = [&](std::string_view what, size_t num_bytes) {
    if (num_bytes >= kLeastBytes && num_bytes <= kMostBytes &&
        num_bytes % transport::kDeviceLineBytes == 0) {
      return;
    }
    refuse(what, " is ", num_bytes, ", expected a multiple of ", transport::kDeviceLineBytes,
           " from ", kLeastBytes, " to ", kMostBytes);
  };
  check_bytes("slot_bytes", tuning.slot_bytes);
  check_bytes("free_chunk_bytes", tuning.free_chunk_bytes);
  constexpr int kWarp = static_cast<int>(kWarpThreads);
  if (tuning.free_threads < kWarp || tuning.free_threads > kThreadsPerBlock ||
      tuning.free_threads % kWarp != 0) {
    refuse("free_threads is ", tuning.free_threads, ", expected a multiple of ", kWarp, " from ",
           kWarp, " to ", kThreadsPerBlock);
  }
}

void check_bucket(const BucketArgs& args, DType dtype, const WireFormat& wire) {
  if (!is_bucket_dtype(dtype))
    refuse("gradients are ", name(dtype), ", expected floats of 16, 32 or 64 bits");
  if (!is_wire_dtype(wire.dtype)) refuse(name(wire.dtype), " is no wire dtype");
  if (wire.is_block_scaled && !has_block_scaling(wire.dtype)) {
    refuse(name(wire.dtype), " has no block scaling");
  }
  if (args.num_tiles != 0 && args.wire == nullptr) {
    refuse("a bucket of ", args.num_tiles, " tiles has no wire buffer");
  }
  const uint64_t num_contiguous = args.tiles != nullptr ? 0 : args.contiguous.num_elems;
  if (args.tiles == nullptr && args.num_tiles != schedule::ceil_div(num_contiguous, kTileElems)) {
    refuse("a bucket of ", args.num_tiles, " tiles has no list of them and is a tensor of ",
           num_contiguous, " elements");
  }
  if (num_contiguous != 0 && args.contiguous.data == nullptr) {
    refuse("a tensor of ", num_contiguous, " elements has no data");
  }
  if (!is_aligned_to(args.wire, kAccessBytes) || !is_aligned_to(args.tiles, alignof(Tile))) {
    refuse("the wire buffer is at ", static_cast<const void*>(args.wire), " and the list at ",
           static_cast<const void*>(args.tiles), ", expected multiples of ", kAccessBytes);
  }
  for (const float factor : {args.contribution_factor, args.result_factor}) {
    if (!(std::isnormal(factor) && factor > 0))
      refuse("a factor is ", factor, ", expected a positive normal number");
  }
}

}  // namespace rota::cuda
