// What every mutant of the kernels must fail: each collective between messages that go one way
// only, of which the sender learns nothing but through its own waits.
#include <algorithm>

#include "check.h"
#include "kernel_calls.h"
#include "mutant.h"

namespace rota::test {
namespace {

// A wait that comes to nothing is one way for a mutant to fail.
constexpr std::chrono::seconds kMutantPatience{2};

GridShape shape_of(int world_size) {
  const std::chrono::nanoseconds patience = the_mutant == kNoMutant ? kPatience : kMutantPatience;
  return {.world_size = world_size,
          .timeout_ns = static_cast<uint64_t>(patience.count()),
          .late_pace = Pace::kSlow};
}

// Sends, broadcasts and the kernel in turns; every rank is root and receiver of several of them.
void among_one_way_messages(int world_size, Kernel kernel, int num_turns) {
  HostGrid grid(shape_of(world_size));
  // One message in each channel, both slots, and slots that come round.
  const auto num_elems_of = [&](const KernelCall& call, uint64_t variant) {
    const uint64_t chunk = chunk_elems(call, grid.shape());
    if (call.kernel == Kernel::kLowLatency) return chunk * 2 - variant;
    constexpr uint64_t kNumChunks[] = {2, 4, 1, 7, 13};
    return kNumChunks[variant % 5] * chunk * static_cast<uint64_t>(world_size) - variant * 4;
  };
  std::vector<KernelCall> calls;
  for (int turn = 0; turn < num_turns; ++turn) {
    for (const Kernel next : {Kernel::kSend, kernel, Kernel::kBroadcast, kernel, kernel}) {
      const uint64_t variant = calls.size();
      KernelCall call{.kernel = next,
                      .format = {variant % 3 == 0 ? DType::kFloat16 : DType::kFloat32},
                      .group_size = kernel == Kernel::kHierarchical ? 2 : 0,
                      .root = turn % world_size,
                      .receiver = (turn + 1 + turn / world_size % (world_size - 1)) % world_size,
                      .seed = variant};
      if (call.receiver == call.root) call.receiver = (call.root + 1) % world_size;
      call.num_elems = num_elems_of(call, variant % 7);
      call.num_elems -= call.num_elems % static_cast<uint64_t>(world_size);
      calls.push_back(call);
    }
  }
  call_and_check(grid, calls);
}

template <Kernel kKernel>
void of_three() {
  among_one_way_messages(3, kKernel, 12);
}

const CaseTable kCases{
    {"kernel_mutants-one_shot", of_three<Kernel::kOneShot>},
    {"kernel_mutants-two_shot", of_three<Kernel::kTwoShot>},
    {"kernel_mutants-two_shot_in_place", of_three<Kernel::kTwoShotInPlace>},
    {"kernel_mutants-ring", of_three<Kernel::kRing>},
    {"kernel_mutants-ordered_ring", of_three<Kernel::kOrderedRing>},
    {"kernel_mutants-hierarchical",
     [] { among_one_way_messages(4, Kernel::kHierarchical, 16); }},
    {"kernel_mutants-low_latency", of_three<Kernel::kLowLatency>},
    {"kernel_mutants-reduce_scatter", of_three<Kernel::kReduceScatter>},
    {"kernel_mutants-all_gather", of_three<Kernel::kAllGather>},
    {"kernel_mutants-point_to_point", of_three<Kernel::kBroadcast>},
};

}  // namespace
}  // namespace rota::test
