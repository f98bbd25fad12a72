#include "cuda/launch_checks.h"

#include <algorithm>
#include <cmath>

#include "schedule/chunk.h"

namespace rota::cuda {
namespace {

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

void check_peers(const Peers& peers, Kernel kernel) {
  const transport::DeviceGeometry& geometry = peers.geometry;
  const int least_ranks = kernel == Kernel::kOneShot ? 1 : 2;  // a single rank only rounds
  if (geometry.world_size < least_ranks || geometry.world_size > kMaxWorldSize) {
    refuse_launch("world_size is ", geometry.world_size, ", ", name(kernel), " takes ", least_ranks,
                  " to ", kMaxWorldSize);
  }
  if (peers.first_rank < 0 || peers.first_rank >= geometry.world_size) {
    refuse_launch("rank is ", peers.first_rank, ", expected 0 to ", geometry.world_size - 1);
  }
  const int most_local_ranks = std::min(geometry.world_size - peers.first_rank, kMaxLocalRanks);
  if (peers.num_local_ranks < 1 || peers.num_local_ranks > most_local_ranks) {
    refuse_launch("num_local_ranks is ", peers.num_local_ranks, ", expected 1 to ",
                  most_local_ranks);
  }
  if (geometry.num_channels < 1) {
    refuse_launch("num_channels is ", geometry.num_channels, ", expected 1 or more");
  }
  if (geometry.slot_bytes % transport::kDeviceLineBytes != 0 ||
      geometry.packet_bytes % transport::kDeviceLineBytes != 0) {
    refuse_launch("slot_bytes is ", geometry.slot_bytes, " and packet_bytes ",
                  geometry.packet_bytes, ", expected multiples of ", transport::kDeviceLineBytes);
  }
  for (int rank = 0; rank < geometry.world_size; ++rank) {
    const std::byte* region = peers.regions[rank];
    if (region == nullptr || !is_aligned(region, transport::kDeviceLineBytes)) {
      refuse_launch("the region of rank ", rank, " is at ", static_cast<const void*>(region),
                    ", expected an address that is a multiple of ", transport::kDeviceLineBytes);
    }
  }
  if (peers.abort == nullptr || peers.num_left == nullptr || peers.failure == nullptr ||
      peers.stall == nullptr) {
    refuse_launch("there is no word for aborts, for ranks that left, for failures or for stalls");
  }
}

void check_tree(const LaunchRequest& request, const Peers& peers) {
  check_adds_in_tree(request.kernel);
  if (peers.world_size() > kMostTreeRanks) {
    refuse_launch("world_size is ", peers.world_size(), ", kernels add along trees of up to ",
                  kMostTreeRanks, " ranks");
  }
}

void check_arithmetic(const LaunchRequest& request, const Peers& peers) {
  const int group_size = group_size_of(request, peers);
  const DType dtype = request.format.dtype;
  if (!is_defined(request.op, dtype)) {
    refuse_launch(name(request.kernel), " does not take op ", name(request.op), " of ",
                  name(dtype));
  }
  if (request.format.is_block_scaled) {
    if (!has_block_scaling(dtype)) refuse_launch(name(dtype), " has no block scaling");
    if (request.op != ReduceOp::kSum && request.op != ReduceOp::kAvg) {
      refuse_launch("op is ", name(request.op), ", with block scaling sum and avg are taken");
    }
    if (request.kernel == Kernel::kLowLatency || request.kernel == Kernel::kReduceScatter) {
      refuse_launch(name(request.kernel), " does not take block scaling; use one_shot or two_shot");
    }
  }
  if (request.op == ReduceOp::kAvg && !(std::isfinite(request.divisor) && request.divisor > 0)) {
    refuse_launch("divisor is ", request.divisor, ", avg takes a positive finite one");
  }
  if (request.op == ReduceOp::kAvg && !info(dtype).is_floating &&
      (request.divisor != std::trunc(request.divisor) || request.divisor > INT32_MAX)) {
    refuse_launch("divisor is ", request.divisor, ", avg of ", name(dtype),
                  " takes a whole one below 2^31");
  }
  if (request.rounding.is_stochastic && !is_wire_dtype(dtype)) {
    refuse_launch("stochastic rounding of ", name(dtype),
                  " was asked for; it is for floats of 32 bits ", "and fewer");
  }
  if (group_size < 1 || peers.world_size() % group_size != 0) {
    refuse_launch("group_size is ", group_size, ", expected a divisor of world_size ",
                  peers.world_size());
  }
  if (request.sums == Sums::kInTree) check_tree(request, peers);
  const bool is_ring = request.kernel == Kernel::kRing || request.kernel == Kernel::kOrderedRing;
  if (is_ring && group_size != peers.world_size()) {
    refuse_launch("group_size is ", group_size, ", but ", name(request.kernel),
                  " adds ranks one after another; use hierarchical, one_shot or two_shot");
  }
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
    refuse_launch("input at ", own.input, " and output at ", own.output,
                  " overlap; work in place, or on tensors that lie apart");
  }
}

void check_own_tensors(const LaunchRequest& request, const Peers& peers, const OwnTensors& own) {
  const bool lacks_input = own.reads && own.input == nullptr;
  if (lacks_input || (own.writes && own.output == nullptr)) {
    refuse_launch(name(request.kernel), " of ", request.num_elems, " elements has no ",
                  lacks_input ? "input" : "output", " of rank ", own.rank);
  }
  if (own.reads && own.writes) check_overlap(request, peers, own);
  if (request.format.is_block_scaled &&
      (!is_aligned(own.input, kAccessBytes) || !is_aligned(own.output, kAccessBytes))) {
    refuse_launch("tensors in scaled blocks start at multiples of ", kAccessBytes, " bytes, got ",
                  own.input, " and ", own.output);
  }
  if (request.kernel == Kernel::kTwoShotInPlace &&
      (own.input != own.output || request.tensors->of[own.rank] != own.input)) {
    refuse_launch("two_shot_in_place works in place, on this rank's mapped tensor");
  }
}

void check_ends(const LaunchRequest& request, const Peers& peers) {
  const bool is_transfer = request.kernel == Kernel::kTransfer;
  if (!has_source(request.kernel)) return;
  for (const int rank : {request.source, is_transfer ? request.destination : request.source}) {
    if (rank >= 0 && rank < peers.world_size()) continue;
    refuse_launch(name(request.kernel), " with rank ", rank, " as an end: expected 0 to ",
                  peers.world_size() - 1);
  }
  if (!is_transfer) return;
  if (request.source == request.destination) {
    refuse_launch("transfer from rank ", request.source, " to itself; expected two ranks");
  }
  if (peers.num_local_ranks == 1 && peers.first_rank != request.source &&
      peers.first_rank != request.destination) {
    refuse_launch("transfer from rank ", request.source, " to rank ", request.destination,
                  " on rank ", peers.first_rank, ", which has no part in it");
  }
}

}  // namespace

int group_size_of(const LaunchRequest& request, const Peers& peers) {
  return request.group_size == 0 ? peers.world_size() : request.group_size;
}

bool has_equal_shards(Kernel kernel) {
  return kernel == Kernel::kReduceScatter || kernel == Kernel::kAllGather;
}

bool has_source(Kernel kernel) {
  return kernel == Kernel::kTransfer || kernel == Kernel::kBroadcast;
}

bool adds_in_tree(Kernel kernel) {
  return reduces(kernel) && kernel != Kernel::kRing && kernel != Kernel::kOrderedRing &&
         kernel != Kernel::kHierarchical;
}

void check_adds_in_tree(Kernel kernel) {
  if (adds_in_tree(kernel)) return;
  refuse_launch(name(kernel), " does not add along a tree; use one_shot or two_shot");
}

void check_tensors(const LaunchRequest& request, const Peers& peers) {
  if (has_equal_shards(request.kernel) &&
      request.num_elems % static_cast<uint64_t>(peers.world_size()) != 0) {
    refuse_launch(name(request.kernel), " of ", request.num_elems, " elements among ",
                  peers.world_size(),
                  " ranks: shards are equally long, so pad to a multiple of world_size");
  }
  if (request.kernel == Kernel::kTwoShotInPlace) {
    if (request.tensors == nullptr)
      refuse_launch("two_shot_in_place needs every rank's mapped tensor");
    for (int rank = 0; rank < peers.world_size(); ++rank) {
      if (request.tensors->of[rank] == nullptr)
        refuse_launch("the tensor of rank ", rank, " is not mapped");
    }
  }
  for (int place = 0; place < peers.num_local_ranks; ++place) {
    check_own_tensors(request, peers, own_tensors(request, peers, place));
  }
}

void check_launch(const LaunchRequest& request, const Peers& peers) {
  check_peers(peers, request.kernel);
  if (reduces(request.kernel)) check_arithmetic(request, peers);
  check_ends(request, peers);
}

void check_capacity(const LaunchRequest& request, const transport::DeviceGeometry& geometry,
                    uint64_t capacity, uint64_t granule_elems) {
  if (capacity != 0) return;
  refuse_launch("slot_bytes is ", geometry.slot_bytes, " and packet_bytes ", geometry.packet_bytes,
                ", too few for ", name(request.kernel), " of ", name(request.format.dtype), ": ",
                granule_elems, " elements must fit");
}

void check_tuning(const schedule::Tuning& tuning) {
  if (tuning.num_channels < 0) {
    refuse_launch("num_channels is ", tuning.num_channels,
                  ", expected 0 for all that are resident, or more");
  }
  // Less would not hold the granule of every kernel and dtype; kernels cannot count more.
  constexpr size_t kLeastBytes = 4096, kMostBytes = size_t{1} << 30;
  const auto check_bytes = [&](std::string_view what, size_t num_bytes) {
    if (num_bytes >= kLeastBytes && num_bytes <= kMostBytes &&
        num_bytes % transport::kDeviceLineBytes == 0) {
      return;
    }
    refuse_launch(what, " is ", num_bytes, ", expected a multiple of ", transport::kDeviceLineBytes,
                  " from ", kLeastBytes, " to ", kMostBytes);
  };
  check_bytes("slot_bytes", tuning.slot_bytes);
  check_bytes("free_chunk_bytes", tuning.free_chunk_bytes);
  constexpr int kWarp = static_cast<int>(kWarpThreads);
  if (tuning.free_threads < kWarp || tuning.free_threads > kThreadsPerBlock ||
      tuning.free_threads % kWarp != 0) {
    refuse_launch("free_threads is ", tuning.free_threads, ", expected a multiple of ", kWarp,
                  " from ", kWarp, " to ", kThreadsPerBlock);
  }
}

void check_bucket(const BucketArgs& args, DType dtype, const WireFormat& wire) {
  if (!is_bucket_dtype(dtype))
    refuse_launch("gradients are ", name(dtype), ", expected floats of 16, 32 or 64 bits");
  if (!is_wire_dtype(wire.dtype)) refuse_launch(name(wire.dtype), " is no wire dtype");
  if (wire.is_block_scaled && !has_block_scaling(wire.dtype)) {
    refuse_launch(name(wire.dtype), " has no block scaling");
  }
  if (args.num_tiles != 0 && args.wire == nullptr) {
    refuse_launch("a bucket of ", args.num_tiles, " tiles has no wire buffer");
  }
  const uint64_t num_contiguous = args.tiles != nullptr ? 0 : args.contiguous.num_elems;
  if (args.tiles == nullptr && args.num_tiles != schedule::ceil_div(num_contiguous, kTileElems)) {
    refuse_launch("a bucket of ", args.num_tiles, " tiles has no list of them and is a tensor of ",
                  num_contiguous, " elements");
  }
  if (num_contiguous != 0 && args.contiguous.data == nullptr) {
    refuse_launch("a tensor of ", num_contiguous, " elements has no data");
  }
  if (!is_aligned(args.wire, kAccessBytes) || !is_aligned(args.tiles, alignof(Tile))) {
    refuse_launch("the wire buffer is at ", static_cast<const void*>(args.wire),
                  " and the list at ", static_cast<const void*>(args.tiles),
                  ", expected multiples of ", kAccessBytes);
  }
  for (const float factor : {args.contribution_factor, args.result_factor}) {
    if (!(std::isnormal(factor) && factor > 0))
      refuse_launch("a factor is ", factor, ", expected a positive normal number");
  }
}

}  // namespace rota::cuda
