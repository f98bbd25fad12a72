#include "cuda/launch.h"

#include <algorithm>

#include "cuda/cuda_error.h"
#include "cuda/kernels.h"
#include "schedule/chunk.h"

namespace rota::cuda {
namespace {

const void* kernel_of(Kernel kernel, const WireFormat& format) {
  switch (kernel) {
    case Kernel::kLowLatency:
      return low_latency_kernel_of(format);
    case Kernel::kOneShot:
      return one_shot_kernel_of(format);
    case Kernel::kTwoShot:
      return two_shot_kernel_of(format);
    case Kernel::kTwoShotInPlace:
      return two_shot_in_place_kernel_of(format);
    case Kernel::kOrderedRing:
      return ordered_ring_kernel_of(format);
    case Kernel::kRing:
      return ring_kernel_of(format);
    case Kernel::kHierarchical:
      return hierarchical_kernel_of(format);
    case Kernel::kReduceScatter:
      return reduce_scatter_kernel_of(format);
    case Kernel::kAllGather:
      return all_gather_kernel_of(format);
    case Kernel::kBroadcast:
      return broadcast_kernel_of(format);
    case Kernel::kSend:
      return send_kernel_of(format);
    case Kernel::kReceive:
      return receive_kernel_of(format);
  }
  return nullptr;
}

[[noreturn]] void refuse_format(std::string_view kernel, const WireFormat& format) {
  throw Error(ErrorKind::kValue, join(kernel, " has no kernel for ", name(format.dtype),
                                      format.is_block_scaled ? " in scaled blocks" : ""));
}

// How many blocks of a kernel the current GPU runs at the same time.
int num_resident_blocks(const void* kernel) {
  int device = 0;
  int num_multiprocessors = 0;
  int blocks_each = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, kThreadsPerBlock, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return num_multiprocessors * blocks_each;
}

void launch(const void* kernel, int num_blocks, void** args, Stream stream) {
  check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreadsPerBlock),
                         args, 0, stream),
        "cudaLaunchKernel");
}

// As many blocks as run at once and have a tile: each takes its share of the tiles.
int num_bucket_blocks(const void* kernel, uint64_t num_tiles) {
  const auto num_resident = static_cast<uint64_t>(num_resident_blocks(kernel));
  const uint64_t num_needed = schedule::ceil_div(num_tiles, kThreadsPerBlock / kTileThreads);
  return static_cast<int>(schedule::min_of(num_resident, num_needed));
}

}  // namespace

void launch_collective(const LaunchRequest& request, const Peers& peers, int ranks_per_device,
                       Stream stream) {
  LaunchPlan plan = plan_launch(request, peers);
  if (plan.num_blocks == 0) return;
  const void* kernel = kernel_of(request.kernel, request.format);
  if (kernel == nullptr) refuse_format(name(request.kernel), request.format);
  const int num_resident = num_resident_blocks(kernel);
  if (plan.num_blocks * ranks_per_device > num_resident) {
    throw Error(ErrorKind::kValue,
                join(name(request.kernel), " of ", ranks_per_device, " ranks with ",
                     plan.num_blocks, " channels each: this GPU runs ", num_resident,
                     " such blocks at the same time; use fewer channels"));
  }
  MappedTensors tensors{};
  if (request.tensors != nullptr) tensors = *request.tensors;
  void* args[] = {const_cast<Peers*>(&peers), &plan.args, &tensors};
  launch(kernel, plan.num_blocks, args, stream);
}

void launch_pack(const PackArgs& args, DType dtype, const WireFormat& wire, Stream stream) {
  check_bucket(args.bucket, dtype, wire);
  if (args.bucket.num_tiles == 0) return;
  const void* kernel = pack_kernel_of(dtype, wire);
  if (kernel == nullptr) refuse_format("pack", wire);
  void* kernel_args[] = {const_cast<PackArgs*>(&args)};
  launch(kernel, num_bucket_blocks(kernel, args.bucket.num_tiles), kernel_args, stream);
}

void launch_unpack(const UnpackArgs& args, DType dtype, const WireFormat& wire, Stream stream) {
  check_bucket(args.bucket, dtype, wire);
  const void* kernel = unpack_kernel_of(dtype, wire);
  if (kernel == nullptr) refuse_format("unpack", wire);
  // Without tiles, too: their sum of squares is 0.
  const int num_blocks = std::max(1, num_bucket_blocks(kernel, args.bucket.num_tiles));
  void* kernel_args[] = {const_cast<UnpackArgs*>(&args)};
  launch(kernel, num_blocks, kernel_args, stream);
}

}  // namespace rota::cuda
