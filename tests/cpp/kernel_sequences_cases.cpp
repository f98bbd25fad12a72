// Sequences of different collectives on the same links, with ranks late in turn. Slots, flags and
// counts carry over from one launch to the next, and nothing else orders the launches.
#include <algorithm>

#include "calls.h"
#include "check.h"
#include "kernel_calls.h"

namespace rota::test {
namespace {

GridShape shape_of(int world_size, int num_threads) {
  return {.world_size = world_size,
          .num_blocks = 3,
          .num_threads = num_threads,
          .slot_bytes = kBucketSlotBytes,
          .packet_bytes = kBucketSlotBytes};
}

KernelCall random_call(Random& random, const GridShape& shape) {
  const int world_size = shape.world_size;
  KernelCall call{.kernel = random.choose(kAllKernels)};
  call.is_bucket = call.kernel != Kernel::kReduceScatter && random.below(4) == 0;
  if (call.is_bucket) {
    call.format = random.choose(kBucketFormats);
    call.op = random.below(2) == 0 ? ReduceOp::kSum : ReduceOp::kAvg;
    if (!is_defined(call.kernel, call.format)) call.format.is_block_scaled = false;
    // Kernels that move bytes or equal shards cut them anywhere, so not into blocks.
    const bool moves = call.kernel == Kernel::kAllGather || call.kernel == Kernel::kBroadcast ||
                       call.kernel == Kernel::kTransfer;
    if (moves) call = {.kernel = call.kernel};
  } else {
    call.format.dtype = random.choose(reducible_dtypes());
    call.op = random.choose(defined_ops(call.format.dtype));
  }
  const bool is_ring = call.kernel == Kernel::kRing || call.kernel == Kernel::kOrderedRing;
  if (world_size == 4 && !is_ring && random.below(2) == 0) call.group_size = 2;
  call.root = random.below(world_size);
  call.receiver = (call.root + 1 + random.below(world_size - 1)) % world_size;
  call.num_blocks = 1 + random.below(shape.num_blocks);
  call.seed = random.next();
  // In some calls nobody is late.
  call.late_rank = random.below(world_size + 1) - 1;
  // Up to three slots of each channel, mostly fewer.
  const uint64_t chunk = chunk_elems(call, shape);
  const uint64_t limits[] = {16, chunk, 3 * chunk, 6 * chunk};
  call.num_elems = random.below(random.choose(limits)) + 1;
  if (call.kernel == Kernel::kLowLatency) {
    call.num_elems = std::min(call.num_elems, chunk * static_cast<uint64_t>(shape.num_blocks));
  }
  if (call.kernel == Kernel::kReduceScatter || call.kernel == Kernel::kAllGather) {
    call.num_elems *= static_cast<uint64_t>(world_size);
  } else {
    call.is_in_place = random.below(2) == 0;
  }
  if (!call.format.is_block_scaled && random.below(3) == 0) {
    call.misalignment = info(call.format.dtype).num_bytes;
  }
  return call;
}

void mixed_calls(int world_size, int num_threads, int num_calls) {
  HostGrid grid(shape_of(world_size, num_threads));
  Random random(world_size);
  std::vector<KernelCall> calls;
  while (static_cast<int>(calls.size()) < num_calls) {
    calls.push_back(random_call(random, grid.shape()));
  }
  call_and_check(grid, calls);
}

// The two packet buffers alternate, and a late rank still finds its packets.
void packets_one_after_another(int world_size, int num_calls) {
  HostGrid grid(shape_of(world_size, /*num_threads=*/8));
  std::vector<KernelCall> calls;
  for (int i = 0; i < num_calls; ++i) {
    calls.push_back({.kernel = Kernel::kLowLatency,
                     .num_elems = static_cast<uint64_t>(100 + i % 100),
                     .late_rank = i % (world_size + 1) - 1,
                     .seed = static_cast<uint64_t>(i)});
  }
  call_and_check(grid, calls);
}

const CaseTable kCases{
    {"kernel_mixed_calls-ws2", mixed_calls, 2, 8, 500},
    {"kernel_mixed_calls-ws3", mixed_calls, 3, 8, 300},
    {"kernel_mixed_calls-ws4", mixed_calls, 4, 8, 200},
    {"kernel_mixed_calls-ws3-16_threads", mixed_calls, 3, 16, 150},
    {"kernel_packets-ws2", packets_one_after_another, 2, 300},
    {"kernel_packets-ws4", packets_one_after_another, 4, 200},
};

}  // namespace
}  // namespace rota::test
