// The cases in which every mutant of the kernels must fail: each collective runs between one-way
// messages, about which the sender learns nothing except through its own waits, or adds numbers
// whose sum depends on the order.
#include <algorithm>

#include "check.h"
#include "kernel_calls.h"
#include "mutant.h"
#include "schedule/ring.h"

namespace rota::test {
namespace {

// A mutant may fail by waiting for ever, so its waits time out early.
constexpr std::chrono::seconds kMutantPatience{2};

GridShape shape_of(int world_size) {
  return {.world_size = world_size,
          .timeout = the_mutant == kNoMutant ? kPatience : kMutantPatience};
}

// Gives every link num_messages messages in each channel. Two fill its slots, and the sender has
// not waited yet; more reuse the slots.
uint64_t num_elems_of(const KernelCall& call, const GridShape& shape, uint64_t num_messages) {
  const auto num_blocks = static_cast<uint64_t>(call.num_blocks);
  const uint64_t num_elems = num_messages * num_blocks * chunk_elems(call, shape);
  if (call.kernel == Kernel::kLowLatency) return num_elems / num_messages;
  constexpr Kernel kWithoutShards[] = {Kernel::kOneShot, Kernel::kOrderedRing, Kernel::kBroadcast,
                                       Kernel::kTransfer};
  const bool has_shards = std::ranges::count(kWithoutShards, call.kernel) == 0;
  return has_shards ? num_elems * static_cast<uint64_t>(shape.world_size) : num_elems;
}

// Alternates sends, broadcasts and the kernel; every rank sends to every other. The first receiver
// is late, so that the sender goes on without having heard from it. In calls of the kernel, ranks
// are late in turn.
void among_one_way_messages(int world_size, Kernel kernel) {
  HostGrid grid(shape_of(world_size));
  std::vector<KernelCall> calls;
  const auto add = [&](Kernel next, int root, int receiver, int late_rank, uint64_t num_messages) {
    calls.push_back({.kernel = next,
                     .format = {calls.size() % 3 == 0 ? DType::kFloat16 : DType::kFloat32},
                     .group_size = kernel == Kernel::kHierarchical ? 2 : 0,
                     .root = root,
                     .receiver = receiver,
                     .late_rank = late_rank,
                     .seed = calls.size()});
    calls.back().num_elems = num_elems_of(calls.back(), grid.shape(), num_messages);
  };
  for (int root = 0; root < world_size; ++root) {
    const int next = schedule::next_rank(root, world_size);
    for (int distance = 1; distance < world_size; ++distance) {
      const int receiver = (root + distance) % world_size;
      add(Kernel::kTransfer, root, receiver, receiver, 2);
      add(kernel, root, receiver, receiver, 1);
      add(Kernel::kBroadcast, root, receiver, next, 2);
      add(kernel, root, receiver, root, 4);
      add(Kernel::kBroadcast, root, receiver, next, 5);
      add(kernel, root, receiver, next, 1);
      add(kernel, root, receiver, kNobody, 3);
    }
  }
  call_and_check(grid, calls);
}

// Numbers whose sum depends on the order in which they are added.
void in_a_tree() {
  HostGrid grid(shape_of(8));
  call_and_check(grid,
                 {KernelCall{.num_elems = 1000, .is_tree = true, .numbers = Numbers::kMixed}});
}

const CaseTable kCases{
    {"kernel_mutants-one_shot", among_one_way_messages, 3, Kernel::kOneShot},
    {"kernel_mutants-two_shot", among_one_way_messages, 3, Kernel::kTwoShot},
    {"kernel_mutants-two_shot_in_place", among_one_way_messages, 3, Kernel::kTwoShotInPlace},
    {"kernel_mutants-ring", among_one_way_messages, 3, Kernel::kRing},
    {"kernel_mutants-ordered_ring", among_one_way_messages, 3, Kernel::kOrderedRing},
    {"kernel_mutants-hierarchical", among_one_way_messages, 4, Kernel::kHierarchical},
    {"kernel_mutants-low_latency", among_one_way_messages, 3, Kernel::kLowLatency},
    {"kernel_mutants-reduce_scatter", among_one_way_messages, 3, Kernel::kReduceScatter},
    {"kernel_mutants-all_gather", among_one_way_messages, 3, Kernel::kAllGather},
    {"kernel_mutants-point_to_point", among_one_way_messages, 3, Kernel::kBroadcast},
    {"kernel_mutants-tree", in_a_tree},
};

}  // namespace
}  // namespace rota::test
