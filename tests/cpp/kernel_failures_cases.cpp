// Waits that fail: a rank never launches, a rank aborts, a rank launches something else, or the
// launch is of a graph whose communicator is gone. Every thread of every block returns, the failure
// gives the reason, no message is counted, and the results are NaN.
#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>

#include "check.h"
#include "cuda/spoil.h"
#include "cuda/wait.h"
#include "kernel_calls.h"

namespace rota::test {
namespace {

using cuda::FailureKind;
using cuda::WaitPhase;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

// Long compared with scheduling delays on a busy machine, so that no present rank seems absent.
constexpr nanoseconds kShort = milliseconds(500);
// Kernels that have not returned after this time are aborted.
constexpr nanoseconds kLong = std::chrono::seconds(5);
constexpr int kWorldSize = 3;
constexpr uint64_t kLength = 3000;  // of most calls
constexpr int kOdd = 1;             // in rings, both of its neighbours wait for it

enum class Trouble : uint8_t { kIsAbsent, kIsAbsentUntilAbort, kHasAnotherLaunch, kIsRetired };

// In these a rank awaits all others at once.
constexpr Kernel kAwaitAllAtOnce[] = {Kernel::kOneShot,        Kernel::kTwoShot,
                                      Kernel::kTwoShotInPlace, Kernel::kHierarchical,
                                      Kernel::kReduceScatter,  Kernel::kAllGather};

class LaunchWithTrouble : public PlainWork {
 public:
  // watched: the rank whose failure is checked.
  LaunchWithTrouble(HostGrid& grid, const KernelCall& call, Trouble trouble, int watched)
      : grid_(grid), call_(call), trouble_(trouble), watched_(watched) {
    const size_t num_bytes = call.format.num_bytes(call.num_elems);
    for (int rank = 0; rank < kWorldSize; ++rank) {
      tensors_.emplace_back(num_bytes);
      outputs_.push_back(tensors_.back().data());
    }
    // Shards are not in place.
    for (std::byte* output : outputs_) {
      inputs_.push_back(has_shards() ? tensors_.emplace_back(num_bytes).data() : output);
    }
  }

  int num_blocks(int) const { return call_.num_blocks; }
  // Ranks whose threads start late would seem absent.
  void prepare(int, int) { have_started_.arrive_and_wait(); }
  void launch(const HostBlock& block, int rank, int) {
    if (trouble_ == Trouble::kIsRetired && rank != watched_) return;
    if (rank == kOdd && trouble_ != Trouble::kHasAnotherLaunch && trouble_ != Trouble::kIsRetired) {
      if (block.thread() == 0 && block.index() == 0) stand_by();
      return;
    }
    KernelLaunch launch = launch_of(call_, grid_.peers(rank), rank, inputs_, outputs_);
    if (rank == kOdd) launch.args.fingerprint ^= uint64_t{1} << 40;
    test::launch(block, grid_.peers(rank), launch);
  }
  bool finish(int rank, int) {
    if (rank != kOdd) ++num_finished_;
    // Other ranks may wait in vain for the watched one.
    if (trouble_ == Trouble::kHasAnotherLaunch && rank == watched_) grid_.abort_everywhere();
    return true;
  }
  bool was_stopped() const { return was_stopped_; }

  // The watched rank's results are NaN, and what is none is as it was.
  void check_spoiled(const std::string& what) const {
    const auto& tensor = tensors_[static_cast<size_t>(watched_)];
    const bool has_source = call_.kernel == Kernel::kBroadcast || call_.kernel == Kernel::kTransfer;
    size_t num_spoiled = has_source && watched_ == call_.root ? 0 : tensor.size();
    if (call_.kernel == Kernel::kReduceScatter) num_spoiled /= kWorldSize;
    for (size_t i = 0; i < tensor.size(); ++i) {
      const std::byte expected = i < num_spoiled ? cuda::kNanByte : std::byte{0};
      if (tensor[i] != expected) fail(join(what, ": byte ", i, " is not spoiled, or is wrongly"));
    }
  }

 private:
  bool has_shards() const {
    return call_.kernel == Kernel::kReduceScatter || call_.kernel == Kernel::kAllGather;
  }
  // All that the absent rank does.
  void stand_by() {
    const auto begin = steady_clock::now();
    if (trouble_ == Trouble::kIsAbsentUntilAbort) {
      std::this_thread::sleep_for(kShort);
      while (!has_heard_all_that_are_there()) std::this_thread::sleep_for(milliseconds(1));
      grid_.abort_everywhere();
    }
    while (num_finished_ < kWorldSize - 1) {
      std::this_thread::sleep_for(milliseconds(1));
      if (steady_clock::now() - begin < kLong) continue;
      was_stopped_ = true;
      return grid_.abort_everywhere();
    }
  }

  // Whether the watched rank, if it awaits both others at once, awaits only the odd one by now.
  bool has_heard_all_that_are_there() const {
    if (std::ranges::count(kAwaitAllAtOnce, call_.kernel) == 0) return true;
    const cuda::Peers& peers = grid_.peers(watched_);
    const int third = kWorldSize - kOdd - watched_;
    for (int channel = 0; channel < call_.num_blocks; ++channel) {
      std::byte* end = peers.regions[watched_] + peers.geometry.link_end(channel, third);
      uint64_t& filled = reinterpret_cast<transport::LinkEnd*>(end)->filled.value;
      if (std::atomic_ref(filled).load(std::memory_order_relaxed) == 0) return false;
    }
    return true;
  }

  HostGrid& grid_;
  KernelCall call_;
  Trouble trouble_;
  int watched_;
  std::deque<std::vector<std::byte>> tensors_;  // of each rank its output; then inputs
  std::vector<std::byte*> inputs_, outputs_;
  HostBarrier have_started_{kWorldSize};
  std::atomic<int> num_finished_ = 0;
  bool was_stopped_ = false;
};

// All counts of a rank: of messages and of rounds of packets.
template <typename Body>
void for_each_count(HostGrid& grid, int rank, const Body& body) {
  const transport::DeviceGeometry& geometry = grid.peers(rank).geometry;
  std::byte* region = grid.peers(rank).regions[rank];
  for (int channel = 0; channel < geometry.num_channels; ++channel) {
    for (int peer = 0; peer < kWorldSize; ++peer) {
      auto& end = *reinterpret_cast<transport::LinkEnd*>(region + geometry.link_end(channel, peer));
      body(end.counts.sent);
      body(end.counts.received);
    }
    body(reinterpret_cast<transport::ChannelState*>(region + geometry.channel_state(channel))
             ->packet_rounds);
  }
}

void check_counts_nothing(HostGrid& grid, const std::string& what) {
  for (int rank = 0; rank < kWorldSize; ++rank) {
    for_each_count(grid, rank, [&](uint64_t count) { check_equal(count, 0, what + ": counted"); });
  }
}

struct GivenUp {
  WaitPhase phase;
  int waiting;  // the rank that awaits the other one
  int awaited = kOdd;
};

FailureKind failure_of(Trouble trouble) {
  switch (trouble) {
    case Trouble::kIsAbsent:
      return FailureKind::kTimeout;
    case Trouble::kIsAbsentUntilAbort:
    case Trouble::kIsRetired:
      return FailureKind::kAborted;
    case Trouble::kHasAnotherLaunch:
      return FailureKind::kMismatch;
  }
  return FailureKind::kNone;
}

void gives_up(KernelCall call, Trouble trouble, const GivenUp& expected) {
  if (call.num_elems == 0) call.num_elems = kLength;
  const nanoseconds timeout = trouble == Trouble::kIsAbsent ? kShort : kLong;
  HostGrid grid({.world_size = kWorldSize, .timeout = timeout});
  LaunchWithTrouble work(grid, call, trouble, expected.waiting);
  const auto begin = steady_clock::now();
  grid.run(1, work);
  const nanoseconds elapsed = steady_clock::now() - begin;
  check(!work.was_stopped(), call.to_string() + " did not give up by itself");
  const cuda::Failure failure = grid.failure(expected.waiting);
  const std::string what = join(call.to_string(), ", ", to_string(failure));
  check(failure.kind == failure_of(trouble), what);
  check(failure.phase == expected.phase, what);
  check_equal(failure.peer, expected.awaited, what + ": the awaited rank");
  check_equal(failure.rank, expected.waiting, what + ": the rank that waited");
  check(failure.channel < call.num_blocks, what);
  check_counts_nothing(grid, what);
  work.check_spoiled(what);
  if (trouble == Trouble::kHasAnotherLaunch) return;
  check(elapsed >= kShort, call.to_string() + " gave up too soon");
  if (trouble != Trouble::kIsAbsent) return;
  const cuda::Failure stall = grid.stall(expected.waiting);
  check(stall.kind == FailureKind::kStall, what + ": no word of a stall before");
  check_equal(stall.peer, expected.awaited, what + ": the awaited rank");
}

void every_kernel_gives_up(Trouble trouble) {
  constexpr WaitPhase kArrival = WaitPhase::kArrival;
  const bool is_absent = trouble != Trouble::kHasAnotherLaunch;
  // Rank 2, the odd rank's successor in rings, waits for it.
  const GivenUp by_next{kArrival, 2};
  for (const Kernel kernel : kAwaitAllAtOnce) {
    gives_up({.kernel = kernel}, trouble, by_next);
  }
  gives_up({.kernel = Kernel::kRing}, trouble, by_next);
  // Here the odd rank receives from rank 0 before it sends anything.
  for (const Kernel kernel : {Kernel::kOrderedRing, Kernel::kBroadcast}) {
    gives_up({.kernel = kernel}, trouble, is_absent ? by_next : GivenUp{kArrival, kOdd, 0});
  }
  gives_up({.kernel = Kernel::kHierarchical, .group_size = 1}, trouble, {kArrival, 0});
  gives_up({.kernel = Kernel::kLowLatency, .num_elems = 200}, trouble, {WaitPhase::kPacket, 0});
  // The sender notices an absent receiver only once its slots are full.
  gives_up({.kernel = Kernel::kTransfer, .root = 0, .receiver = kOdd}, trouble,
           is_absent ? GivenUp{WaitPhase::kFreeSlot, 0} : GivenUp{kArrival, kOdd, 0});
  gives_up({.kernel = Kernel::kTransfer, .root = kOdd, .receiver = 0}, trouble, {kArrival, 0});
}

// The region's counts are what an executor leaves to graphs.
void writes_to_no_peer_when_retired(const KernelCall& call) {
  constexpr int kRank = 0;
  HostGrid grid({.world_size = kWorldSize, .timeout = kLong});
  for_each_count(grid, kRank, [](auto& count) { count = transport::kRetired; });
  grid.abort_everywhere();
  LaunchWithTrouble work(grid, call, Trouble::kIsRetired, kRank);
  grid.run(1, work);
  for (int rank = 1; rank < kWorldSize; ++rank) {
    check(grid.is_untouched(rank), call.to_string() + " of a retired rank wrote to a peer");
  }
  work.check_spoiled(call.to_string() + " of a retired rank");
}

void no_kernel_writes_to_peers_when_retired() {
  for (const Kernel kernel : kAllKernels) {
    const uint64_t num_elems = kernel == Kernel::kLowLatency ? 200 : kLength;
    writes_to_no_peer_when_retired({.kernel = kernel, .num_elems = num_elems});
  }
  writes_to_no_peer_when_retired(
      {.kernel = Kernel::kHierarchical, .num_elems = kLength, .group_size = 1});
}

// A block that only tells the time.
struct WaitingBlock {
  int index() const { return 0; }
  int local_rank() const { return 0; }
  void pause() const {}
  uint64_t now_ns() const {
    return static_cast<uint64_t>(steady_clock::now().time_since_epoch() / nanoseconds(1));
  }
};

// What it awaits arrives, and the sender leaves, after the kernel has looked for it and before the
// kernel reports that it waits: reading the clock comes between the two.
struct BlockHeldUpBeforeItsReport : WaitingBlock {
  uint32_t* num_left;
  bool* is_there;
  mutable uint64_t num_readings = 0;

  uint64_t now_ns() const {
    if (++num_readings == 3) {
      *is_there = true;
      *num_left = 1;
    }
    return 10 * num_readings;
  }
};

// The host's words of a rank that waits for rank 1 and reports a stall at once.
struct LoneWait {
  uint32_t abort = 0;
  uint32_t num_left = 0;
  uint64_t failure = 0;
  uint64_t stall = 0;

  template <typename Block, typename IsThere>
  bool wait_until(const Block& block, nanoseconds timeout, const IsThere& is_there) {
    const cuda::Peers peers{.first_rank = 0,
                            .geometry = {},
                            .regions = {},
                            .abort = &abort,
                            .num_left = &num_left,
                            .failure = &failure,
                            .stall = &stall,
                            .stall_after_ns = 1,
                            .timeout_ns = static_cast<uint64_t>(timeout.count())};
    return cuda::wait_until(block, peers, 1, WaitPhase::kPacket, is_there);
  }
  int num_left_in_stall() const { return cuda::Failure::unpack(stall).num_left; }
};

void a_stall_does_not_know_who_left_since_the_last_look() {
  LoneWait words;
  bool is_there = false;
  const BlockHeldUpBeforeItsReport block{{}, &words.num_left, &is_there};
  const auto wait = [&] {
    return words.wait_until(block, nanoseconds(1000), [&] { return is_there; });
  };
  check(wait(), "gave up on what is there");
  check_equal(words.num_left_in_stall(), 0, "a report from before the departure");
  is_there = false;
  check(!wait(), "did not give up");
  check_equal(words.num_left_in_stall(), 1, "a report from after it");
}

// What a rank has written before it left is there for a kernel that knows that it has left.
void a_stall_that_knows_who_left_comes_after_what_they_sent() {
  LoneWait words;
  int sent = 0;
  std::thread host([&] {
    sent = 42;
    std::atomic_ref(words.num_left).store(1, std::memory_order_release);
  });
  const auto is_there = [&] { return words.num_left_in_stall() == 1 && sent == 42; };
  const bool has_come = words.wait_until(WaitingBlock(), kLong, is_there);
  host.join();
  check(has_come, "gave up");
}

const CaseTable kCases{
    {"kernel_stall_and_departure",
     [] {
       a_stall_does_not_know_who_left_since_the_last_look();
       a_stall_that_knows_who_left_comes_after_what_they_sent();
     }},
    {"kernel_timeout", every_kernel_gives_up, Trouble::kIsAbsent},
    {"kernel_abort", every_kernel_gives_up, Trouble::kIsAbsentUntilAbort},
    {"kernel_retired", no_kernel_writes_to_peers_when_retired},
    {"kernel_another_launch", every_kernel_gives_up, Trouble::kHasAnotherLaunch},
};

}  // namespace
}  // namespace rota::test
