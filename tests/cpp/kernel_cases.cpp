// Every collective's kernel body, at every length at which it cuts tensors: exact numbers, checked
// against scalars. kernel_bits_cases.cpp and kernel_sequences_cases.cpp have every dtype and
// operation.
#include "check.h"
#include "kernel_calls.h"

namespace rota::test {
namespace {

// Short copies are divided among teams of eight threads: here one team, two, and two with threads
// left over.
int num_threads_of(int world_size) { return world_size == 2 ? 8 : world_size == 3 ? 24 : 16; }

GridShape shape_of(int world_size, bool is_bucket) {
  return {.world_size = world_size,
          .num_threads = num_threads_of(world_size),
          .slot_bytes = is_bucket ? kBucketSlotBytes : kPlainSlotBytes,
          .packet_bytes = is_bucket ? 2 * kBucketSlotBytes : 2 * kPlainSlotBytes};
}

int group_size_of(Kernel kernel, int world_size) {
  if (kernel != Kernel::kHierarchical) return 0;
  return world_size % 2 == 0 ? 2 : 1;
}

// Calls of every edge length, of these kernels in turn.
void add_edges(std::vector<KernelCall>& calls, const HostGrid& grid, Kernel kernel, Kernel other) {
  const int world_size = grid.shape().world_size;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt8, DType::kFloat64}) {
    KernelCall call{
        .kernel = kernel, .format = {dtype}, .group_size = group_size_of(kernel, world_size)};
    for (const uint64_t length : edge_lengths(call, grid.shape())) {
      call.num_elems = length;
      call.kernel = calls.size() % 2 == 0 ? kernel : other;
      calls.push_back(varied(call, world_size, calls.size()));
    }
  }
}

void edges(Kernel kernel) {
  for (const int world_size : {2, 3, 4}) {
    HostGrid grid(shape_of(world_size, /*is_bucket=*/false));
    std::vector<KernelCall> calls;
    add_edges(calls, grid, kernel, kernel);
    call_and_check(grid, calls);
  }
}

// Buckets are cut into tiles and into scaled blocks, which several lanes share.
void edges_of_buckets(int world_size) {
  HostGrid grid(shape_of(world_size, /*is_bucket=*/true));
  std::vector<KernelCall> calls;
  for (const Kernel kernel : kAllReduceKernels) {
    for (const WireFormat& format : kBucketFormats) {
      if (!is_defined(kernel, format)) continue;
      KernelCall call{.kernel = kernel,
                      .format = format,
                      .is_bucket = true,
                      .group_size = group_size_of(kernel, world_size)};
      for (const uint64_t length : edge_lengths(call, grid.shape())) {
        // Some of the long ones suffice.
        if (length > 4000 && calls.size() % 4 != 0) continue;
        call.num_elems = length;
        call.op = calls.size() % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAvg;
        calls.push_back(varied(call, world_size, calls.size()));
      }
    }
  }
  call_and_check(grid, calls);
}

GridShape local_shape_of(int world_size) {
  GridShape shape = shape_of(world_size, /*is_bucket=*/false);
  shape.is_one_launch = true;
  return shape;
}

// Every other call is two_shot_in_place, which must leave the other kernels' links as they are.
void local_ranks(int world_size) {
  HostGrid grid(local_shape_of(world_size));
  std::vector<KernelCall> calls;
  for (const Kernel kernel : kAllReduceKernels) {
    add_edges(calls, grid, kernel, Kernel::kTwoShotInPlace);
  }
  call_and_check(grid, calls);
}

// Blocks that wait for nobody need no channel, so there may be more of them than channels.
void local_ranks_need_no_channel(int world_size) {
  GridShape shape = local_shape_of(world_size);
  shape.num_channels = 1;
  shape.num_blocks = 3;
  HostGrid grid(shape);
  std::vector<KernelCall> calls;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt64}) {
    const uint64_t chunk = schedule::kLocalTuning.free_chunk_bytes / info(dtype).num_bytes;
    for (const uint64_t shard : {chunk - 1, chunk, chunk + 1, 5 * chunk}) {
      const uint64_t all = static_cast<uint64_t>(world_size) * shard;
      for (const uint64_t length : {all - 1, all}) {
        calls.push_back({.kernel = Kernel::kTwoShotInPlace,
                         .format = {dtype},
                         .num_elems = length,
                         .num_blocks = shape.num_blocks,
                         .late_rank = static_cast<int>(calls.size()) % world_size,
                         .seed = calls.size()});
      }
    }
  }
  call_and_check(grid, calls);
  for (int rank = 0; rank < world_size; ++rank)
    check(grid.is_untouched(rank), "links and slots stay as they are");
}

const CaseTable kCases{
    {"kernel_edges-one_shot", edges, Kernel::kOneShot},
    {"kernel_edges-two_shot", edges, Kernel::kTwoShot},
    {"kernel_edges-two_shot_in_place", edges, Kernel::kTwoShotInPlace},
    {"kernel_edges-ring", edges, Kernel::kRing},
    {"kernel_edges-ordered_ring", edges, Kernel::kOrderedRing},
    {"kernel_edges-hierarchical", edges, Kernel::kHierarchical},
    {"kernel_edges-low_latency", edges, Kernel::kLowLatency},
    {"kernel_edges-reduce_scatter", edges, Kernel::kReduceScatter},
    {"kernel_edges-all_gather", edges, Kernel::kAllGather},
    {"kernel_edges-broadcast", edges, Kernel::kBroadcast},
    {"kernel_edges-transfer", edges, Kernel::kTransfer},
    {"kernel_edges-buckets-ws2", edges_of_buckets, 2},
    {"kernel_edges-buckets-ws3", edges_of_buckets, 3},
    {"kernel_edges-buckets-ws4", edges_of_buckets, 4},
    {"kernel_local_ranks-ws2", local_ranks, 2},
    {"kernel_local_ranks-ws3", local_ranks, 3},
    {"kernel_local_ranks-ws4", local_ranks, 4},
    {"kernel_local_ranks_need_no_channel-ws2", local_ranks_need_no_channel, 2},
    {"kernel_local_ranks_need_no_channel-ws3", local_ranks_need_no_channel, 3},
    {"kernel_local_ranks_need_no_channel-ws4", local_ranks_need_no_channel, 4},
};

}  // namespace
}  // namespace rota::test
