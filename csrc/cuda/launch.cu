#include "cuda/launch.h"

#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "base/fixed_tree.h"
#include "cuda/kernels.h"
#include "schedule/chunk.h"
#include "transport/cuda_error.h"
#include "transport/gpu_identity.h"

namespace rota::cuda {
namespace {

using transport::check_cuda;
using transport::current_gpu;

const void* kernel_of(Kernel kernel, const WireFormat& format, Sums sums) {
  if (sums == Sums::kInTree && !adds_in_tree(kernel)) return nullptr;
  switch (kernel) {
    case Kernel::kLowLatency:
      return low_latency_kernel_of(format, sums);
    case Kernel::kOneShot:
      return one_shot_kernel_of(format, sums);
    case Kernel::kTwoShot:
      return two_shot_kernel_of(format, sums);
    case Kernel::kTwoShotInPlace:
      return two_shot_in_place_kernel_of(format, sums);
    case Kernel::kOrderedRing:
      return ordered_ring_kernel_of(format);
    case Kernel::kRing:
      return ring_kernel_of(format);
    case Kernel::kHierarchical:
      return hierarchical_kernel_of(format);
    case Kernel::kReduceScatter:
      return reduce_scatter_kernel_of(format, sums);
    case Kernel::kAllGather:
      return all_gather_kernel_of(format);
    case Kernel::kBroadcast:
      return broadcast_kernel_of(format);
    case Kernel::kTransfer:
      return transfer_kernel_of(format);
  }
  return nullptr;
}

[[noreturn]] void refuse_format(std::string_view kernel, const WireFormat& format) {
  throw Error(ErrorKind::kValue, join("rota: ", kernel, " has no kernel for ", name(format.dtype),
                                      format.is_block_scaled ? " in scaled blocks" : ""));
}

int attribute(cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, current_gpu()), "cudaDeviceGetAttribute");
  return value;
}

// How many blocks of a kernel the current GPU runs at the same time. Asking the runtime costs more
// than a launch, so answers are cached.
int num_resident_blocks(const void* kernel, int num_threads) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> known;
  const std::lock_guard lock(mutex);
  int& num_blocks = known[{current_gpu(), kernel}];
  if (num_blocks == 0) {
    int blocks_each = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, num_threads, 0),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    num_blocks = num_multiprocessors() * blocks_each;
  }
  return num_blocks;
}

void check_resident(const ResidentPlan& plan, const Peers& peers) {
  const int num_resident = num_resident_blocks(plan.function, plan.launch.num_threads);
  const int num_blocks = plan.launch.num_blocks;
  if (num_blocks * peers.num_local_ranks <= num_resident) return;
  throw Error(ErrorKind::kValue,
              join("rota: ", name(plan.kernel), " of ", peers.num_local_ranks, " ranks with ",
                   num_blocks, " channels each: this GPU runs ", num_resident,
                   " such blocks at the same time; use fewer channels"));
}

constexpr std::array kAllDTypes = [] {
  std::array<DType, kNumDTypes> dtypes{};
  for (size_t i = 0; i < kNumDTypes; ++i) dtypes[i] = static_cast<DType>(i);
  return dtypes;
}();

void load(const void* kernel) {
  cudaFuncAttributes attributes;
  if (kernel != nullptr)
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

// kAsAWhole: the GPU starts no block before all fit, so two launches cannot each hold room that the
// other one's blocks wait for (csrc/README.md, residency).
enum class Start { kBlockByBlock, kAsAWhole };

void launch(const void* kernel, dim3 num_blocks, int num_threads, void** args, Stream stream,
            Start start = Start::kBlockByBlock) {
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = num_blocks;
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = start == Start::kAsAWhole ? 1 : 0;
  check_cuda(cudaLaunchKernelExC(&config, kernel, args), "cudaLaunchKernelExC");
}

// The number of blocks that take num_items in turn: at most as many as run at once, and such that
// all take equally many items, except in the last round. One block if there are no items, to set
// the bucket's words and stats (the sum of squares is 0).
unsigned num_bucket_blocks(const void* kernel, uint64_t num_items) {
  if (num_items == 0) return 1;
  const auto num_resident = static_cast<uint64_t>(num_resident_blocks(kernel, kBucketThreads));
  const uint64_t num_rounds = schedule::ceil_div(num_items, num_resident);
  return static_cast<unsigned>(schedule::ceil_div(num_items, num_rounds));
}

}  // namespace

void load_kernels() {
  for (const DType wire : kAllDTypes) {
    for (const bool is_block_scaled : {false, true}) {
      const WireFormat format{wire, is_block_scaled};
      for (size_t kernel = 0; kernel < kKernelNames.size(); ++kernel) {
        for (const Sums sums : kAllSums) load(kernel_of(static_cast<Kernel>(kernel), format, sums));
      }
      for (const DType dtype : kAllDTypes) {
        load(pack_kernel_of(dtype, format));
        load(unpack_kernel_of(dtype, format));
      }
    }
  }
}

bool is_compiled(Kernel kernel, const WireFormat& format, Sums sums) {
  return kernel_of(kernel, format, sums) != nullptr;
}

bool is_bucket_compiled(DType gradients, const WireFormat& wire) {
  return pack_kernel_of(gradients, wire) != nullptr && unpack_kernel_of(gradients, wire) != nullptr;
}

int num_multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

bool starts_grids_as_a_whole() { return attribute(cudaDevAttrCooperativeLaunch) != 0; }

ResidentPlan plan_resident(const LaunchRequest& request, const Peers& peers,
                           const schedule::Tuning& tuning) {
  ResidentPlan plan{request.kernel, nullptr, plan_launch(request, peers, tuning), {}};
  if (plan.launch.num_blocks == 0) return plan;
  plan.function = kernel_of(request.kernel, request.format, request.sums);
  if (plan.function == nullptr) refuse_format(name(request.kernel), request.format);
  if (plan.launch.waits) check_resident(plan, peers);
  if (request.tensors != nullptr) plan.tensors = *request.tensors;
  return plan;
}

void launch_collective(const ResidentPlan& plan, const Peers& peers, Stream stream) {
  // The runtime copies the arguments, and takes only void*.
  void* args[] = {const_cast<Peers*>(&peers), const_cast<CollectiveArgs*>(&plan.launch.args),
                  const_cast<MappedTensors*>(&plan.tensors)};
  const dim3 num_blocks(static_cast<unsigned>(plan.launch.num_blocks),
                        static_cast<unsigned>(peers.num_local_ranks));
  const bool waits_for_itself = plan.launch.waits && peers.num_local_ranks > 1;
  launch(plan.function, num_blocks, plan.launch.num_threads, args, stream,
         waits_for_itself ? Start::kAsAWhole : Start::kBlockByBlock);
}

void launch_copy(void* dst, const void* src, size_t num_bytes, Stream stream) {
  if (num_bytes == 0) return;
  check_cuda(cudaMemcpyAsync(dst, src, num_bytes, cudaMemcpyDeviceToDevice, stream),
             "cudaMemcpyAsync");
}

void launch_pack(const PackArgs& args, DType dtype, const WireFormat& wire, Stream stream) {
  check_bucket(args.bucket, dtype, wire);
  const void* kernel = pack_kernel_of(dtype, wire);
  if (kernel == nullptr) refuse_format("pack", wire);
  const uint64_t num_items =
      schedule::ceil_div(args.bucket.num_tiles, uint64_t{kBucketThreads / kWarpThreads});
  void* kernel_args[] = {const_cast<PackArgs*>(&args)};
  launch(kernel, num_bucket_blocks(kernel, num_items), kBucketThreads, kernel_args, stream);
}

void launch_unpack(const UnpackArgs& args, DType dtype, const WireFormat& wire, Stream stream) {
  check_bucket(args.bucket, dtype, wire);
  const void* kernel = unpack_kernel_of(dtype, wire);
  if (kernel == nullptr) refuse_format("unpack", wire);
  static_assert(kBucketThreads / kWarpThreads <= kTreeGroup / kTeams, "each warp has a part");
  const uint64_t num_groups = schedule::ceil_div(args.bucket.num_tiles, kTreeGroup);
  void* kernel_args[] = {const_cast<UnpackArgs*>(&args)};
  launch(kernel, num_bucket_blocks(kernel, num_groups), kBucketThreads, kernel_args, stream);
}

}  // namespace rota::cuda
