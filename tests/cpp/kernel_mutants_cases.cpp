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
  const std::chrono::nanoseconds patience = the_mutant == kNoMutant ? kPatience : kMutantPatience;
  return {.world_size = world_size, .timeout_ns = static_cast<uint64_t>(patience.count())};
}

// Gives every link num_messages messages in each channel. Two fill its slots, and the sender has
// not waited yet; more reuse the slots.
uint64_t num_elems_of(const KernelCall& call, const GridShape& shape, uint64_t num_messages) {
  const auto num_blocks = static_cast<uint64_t>(call.num_blocks);
  const uint64_t num_elems = num_messages * num_blocks * chunk_elems(call, shape);
  switch (call.kernel) {
    case Kernel::kOneShot:
    case Kernel::kOrderedRing:
    case Kernel::kBroadcast:
    case Kernel::kTransfer:
      return num_elems;
    case Kernel::kTwoShot:
    case Kernel::kTwoShotInPlace:
    case Kernel::kRing:
    case Kernel::kHierarchical:
    case Kernel::kReduceScatter:
    case Kernel::kAllGather:
      return num_elems * static_cast<uint64_t>(shape.world_size);
    case Kernel::kLowLatency:
      return num_elems / num_messages;
  }
  return 0;
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

template <Kernel kKernel>
void of_three() {
  among_one_way_messages(3, kKernel);
}

// Numbers whose sum depends on the order in which they are added.
void in_a_tree() {
  HostGrid grid(shape_of(8));
  call_and_check(grid,
                 {KernelCall{.num_elems = 1000, .is_tree = true, .numbers = Numbers::kMixed}});
}

const CaseTable kCases{
    {"kernel_mutants-one_shot", of_three<Kernel::kOneShot>},
    {"kernel_mutants-two_shot", of_three<Kernel::kTwoShot>},
    {"kernel_mutants-two_shot_in_place", of_three<Kernel::kTwoShotInPlace>},
    {"kernel_mutants-ring", of_three<Kernel::kRing>},
    {"kernel_mutants-ordered_ring", of_three<Kernel::kOrderedRing>},
    {"kernel_mutants-hierarchical", [] { among_one_way_messages(4, Kernel::kHierarchical); }},
    {"kernel_mutants-low_latency", of_three<Kernel::kLowLatency>},
    {"kernel_mutants-reduce_scatter", of_three<Kernel::kReduceScatter>},
    {"kernel_mutants-all_gather", of_three<Kernel::kAllGather>},
    {"kernel_mutants-point_to_point", of_three<Kernel::kBroadcast>},
    {"kernel_mutants-tree", in_a_tree},
};

}  // namespace
}  // namespace rota::test
