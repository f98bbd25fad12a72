// Waits that come to nothing: a rank that never launches, and an abort. Every thread of every block
// returns, the failure says why, and nothing is counted.
#include <atomic>
#include <thread>

#include "check.h"
#include "kernel_calls.h"

namespace rota::test {
namespace {

using cuda::FailureKind;
using cuda::WaitPhase;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr nanoseconds kShort = milliseconds(30);
// Kernels that have not returned after so long are told to.
constexpr nanoseconds kLong = std::chrono::seconds(5);
constexpr int kWorldSize = 3;
constexpr int kAbsent = 1;  // where both of its neighbours wait for it in rings

class LaunchWithoutOne {
 public:
  LaunchWithoutOne(HostGrid& grid, const KernelCall& call, bool aborts)
      : grid_(grid), call_(call), aborts_(aborts), tensors_(kWorldSize) {
    for (auto& tensor : tensors_) tensor.resize(call.format.num_bytes(call.num_elems));
  }

  int num_blocks(int) const { return call_.num_blocks; }
  int late_rank(int) const { return kNobody; }
  void prepare(int, int) {}
  void launch(const HostBlock& block, int rank, int) {
    if (rank == kAbsent) {
      if (block.thread() == 0 && block.index() == 0) stand_by();
      return;
    }
    const bool has_part = rank == call_.root || rank == call_.receiver;
    if (call_.kernel == Kernel::kSend && !has_part) return;
    std::byte* tensor = tensors_[static_cast<size_t>(rank)].data();
    KernelLaunch launch{
        .kernel = call_.kernel,
        .format = call_.format,
        .args = {.input = tensor,
                 .output = tensor,
                 .num_elems = call_.num_elems,
                 .granule_elems = kGranuleElems,
                 .chunk_elems = chunk_elems(call_, grid_.shape()),
                 .group_size = call_.group_size == 0 ? kWorldSize : call_.group_size,
                 .is_aligned = true,
                 .op = ReduceOp::kSum,
                 .peer = call_.root}};
    if (call_.kernel == Kernel::kSend) {
      if (rank == call_.receiver) launch.kernel = Kernel::kReceive;
      launch.args.peer = rank == call_.root ? call_.receiver : call_.root;
    }
    for (size_t peer = 0; peer < tensors_.size(); ++peer) {
      launch.tensors.of[peer] = tensors_[peer].data();
    }
    test::launch(block, grid_.peers(rank), launch);
  }
  bool finish(int rank, int) {
    if (rank != kAbsent) ++num_finished_;
    return true;
  }
  bool was_stopped() const { return was_stopped_; }

 private:
  // The absent rank's only work.
  void stand_by() {
    const auto begin = steady_clock::now();
    if (aborts_) std::this_thread::sleep_for(kShort);
    if (aborts_) grid_.abort_everywhere();
    while (num_finished_ < kWorldSize - 1) {
      std::this_thread::sleep_for(milliseconds(1));
      if (steady_clock::now() - begin < kLong) continue;
      was_stopped_ = true;
      return grid_.abort_everywhere();
    }
  }

  HostGrid& grid_;
  KernelCall call_;
  bool aborts_;
  std::vector<std::vector<std::byte>> tensors_;
  std::atomic<int> num_finished_ = 0;
  bool was_stopped_ = false;
};

void check_counts_nothing(HostGrid& grid, const std::string& what) {
  const transport::DeviceGeometry& geometry = grid.peers(0).geometry;
  for (int rank = 0; rank < kWorldSize; ++rank) {
    const std::byte* region = grid.peers(rank).regions[rank];
    for (int channel = 0; channel < geometry.num_channels; ++channel) {
      for (int peer = 0; peer < kWorldSize; ++peer) {
        const auto& end =
            *reinterpret_cast<const transport::LinkEnd*>(region + geometry.link_end(channel, peer));
        check_equal(end.counts.sent, uint64_t{0}, what + ": messages counted as sent");
        check_equal(end.counts.received, uint64_t{0}, what + ": messages counted as received");
      }
      const auto& state = *reinterpret_cast<const transport::ChannelState*>(
          region + geometry.channel_state(channel));
      check_equal(state.packet_rounds, uint64_t{0}, what + ": rounds of packets counted");
    }
  }
}

struct GivenUp {
  WaitPhase phase;
  int waiting;  // the rank that awaits the absent one
};

void gives_up(const KernelCall& call, bool aborts, const GivenUp& expected) {
  const nanoseconds timeout = aborts ? kLong : kShort;
  HostGrid grid({.world_size = kWorldSize, .timeout_ns = static_cast<uint64_t>(timeout.count())});
  LaunchWithoutOne work(grid, call, aborts);
  const auto begin = steady_clock::now();
  grid.run(1, work);
  const nanoseconds elapsed = steady_clock::now() - begin;
  check(!work.was_stopped(), call.to_string() + " did not give up by itself");
  check(elapsed >= kShort, call.to_string() + " gave up too soon");
  const cuda::Failure failure = grid.failure(expected.waiting);
  const std::string what = join(call.to_string(), ", ", to_string(failure));
  check(failure.kind == (aborts ? FailureKind::kAborted : FailureKind::kTimeout), what);
  check(failure.phase == expected.phase, what);
  check_equal(static_cast<int>(failure.peer), kAbsent, what + ": the awaited rank");
  check(failure.channel < static_cast<uint32_t>(call.num_blocks), what);
  check_counts_nothing(grid, what);
}

void every_kernel_gives_up(bool aborts) {
  constexpr WaitPhase kArrival = WaitPhase::kArrival;
  // Rank 2 awaits the absent one wherever it sends in a ring.
  for (const Kernel kernel : {Kernel::kOneShot, Kernel::kTwoShot, Kernel::kTwoShotInPlace,
                              Kernel::kRing, Kernel::kOrderedRing, Kernel::kHierarchical,
                              Kernel::kReduceScatter, Kernel::kAllGather, Kernel::kBroadcast}) {
    gives_up({.kernel = kernel, .num_elems = 3000}, aborts, {kArrival, 2});
  }
  gives_up({.kernel = Kernel::kHierarchical, .num_elems = 3000, .group_size = 1}, aborts,
           {kArrival, 0});
  gives_up({.kernel = Kernel::kLowLatency, .num_elems = 200}, aborts, {WaitPhase::kPacket, 0});
  // Slots are full before the absent rank is asked for anything.
  gives_up({.kernel = Kernel::kSend, .num_elems = 3000, .root = 0, .receiver = kAbsent}, aborts,
           {WaitPhase::kFreeSlot, 0});
  gives_up({.kernel = Kernel::kSend, .num_elems = 3000, .root = kAbsent, .receiver = 0}, aborts,
           {kArrival, 0});
}

const CaseTable kCases{
    {"kernel_timeout", [] { every_kernel_gives_up(/*aborts=*/false); }},
    {"kernel_abort", [] { every_kernel_gives_up(/*aborts=*/true); }},
};

}  // namespace
}  // namespace rota::test
