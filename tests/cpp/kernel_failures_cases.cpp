// Waits that fail: a rank never launches, a rank aborts, a rank launches something else, or the
// launch is of a graph whose communicator is gone. Every thread of every block returns, the failure
// gives the reason, no message is counted, and the results are NaN.
#include <atomic>
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
constexpr int kOdd = 1;  // in rings, both of its neighbours wait for it

enum class Trouble : uint8_t { kIsAbsent, kIsAbsentUntilAbort, kHasAnotherLaunch, kIsRetired };

class LaunchWithTrouble {
 public:
  // watched: the rank whose failure is checked.
  LaunchWithTrouble(HostGrid& grid, const KernelCall& call, Trouble trouble, int watched)
      : grid_(grid), call_(call), trouble_(trouble), watched_(watched), tensors_(kWorldSize) {
    for (auto& tensor : tensors_) tensor.resize(call.format.num_bytes(call.num_elems));
  }

  int num_blocks(int) const { return call_.num_blocks; }
  int late_rank(int) const { return kNobody; }
  // Ranks whose threads start late would seem absent.
  void prepare(int, int) { have_started_.arrive_and_wait(); }
  void launch(const HostBlock& block, int rank, int) {
    if (trouble_ == Trouble::kIsRetired && rank != watched_) return;
    if (rank == kOdd && trouble_ != Trouble::kHasAnotherLaunch && trouble_ != Trouble::kIsRetired) {
      if (block.thread() == 0 && block.index() == 0) stand_by();
      return;
    }
    const bool has_part = rank == call_.root || rank == call_.receiver;
    if (call_.kernel == Kernel::kTransfer && !has_part) return;
    std::byte* tensor = tensors_[static_cast<size_t>(rank)].data();
    const int group_size = call_.group_size == 0 ? kWorldSize : call_.group_size;
    const uint64_t slot_elems = chunk_elems(call_, grid_.shape());
    const uint64_t shard_elems =
        schedule::shard_length(call_.num_elems, num_shards(group_size), kGranuleElems);
    KernelLaunch launch{.kernel = call_.kernel,
                        .format = call_.format,
                        .args = {.input = {tensor},
                                 .output = {tensor},
                                 .format = format(),
                                 .output_floats = output_floats_,
                                 .num_elems = call_.num_elems,
                                 .shard_elems = shard_elems,
                                 .chunk_elems = slot_elems,
                                 .num_chunks = schedule::ceil_div(shard_elems, slot_elems),
                                 .group_size = group_size,
                                 .is_aligned = true,
                                 .op = ReduceOp::kSum,
                                 .source = has_source() ? call_.root : kNobody,
                                 .destination = call_.receiver,
                                 .fingerprint = rank == kOdd ? uint64_t{1} << 40 : 0}};
    for (size_t peer = 0; peer < tensors_.size(); ++peer) {
      launch.tensors.of[peer] = tensors_[peer].data();
    }
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
    const bool has_results = !has_source() || watched_ != call_.root;
    const uint64_t num_elems =
        call_.kernel == Kernel::kReduceScatter
            ? schedule::shard_length(call_.num_elems, kWorldSize, kGranuleElems)
            : call_.num_elems;
    const size_t num_spoiled = has_results ? format().num_bytes(num_elems) : 0;
    for (size_t i = 0; i < tensor.size(); ++i) {
      const std::byte expected = i < num_spoiled ? cuda::kNanByte : std::byte{0};
      if (tensor[i] != expected) fail(join(what, ": byte ", i, " is not spoiled, or is wrongly"));
    }
  }

 private:
  bool has_source() const {
    return call_.kernel == Kernel::kBroadcast || call_.kernel == Kernel::kTransfer;
  }
  WireFormat format() const { return has_source() ? cuda::kBytes : call_.format; }

  uint64_t num_shards(int group_size) const {
    switch (call_.kernel) {
      case Kernel::kTwoShot:
      case Kernel::kTwoShotInPlace:
      case Kernel::kRing:
      case Kernel::kReduceScatter:
      case Kernel::kAllGather:
        return kWorldSize;
      case Kernel::kHierarchical:
        return static_cast<uint64_t>(group_size);
      case Kernel::kLowLatency:
      case Kernel::kOneShot:
      case Kernel::kOrderedRing:
      case Kernel::kBroadcast:
      case Kernel::kTransfer:
        return 1;
    }
    return 1;
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
    switch (call_.kernel) {
      case Kernel::kOneShot:
      case Kernel::kTwoShot:
      case Kernel::kTwoShotInPlace:
      case Kernel::kHierarchical:
      case Kernel::kReduceScatter:
      case Kernel::kAllGather:
        break;
      case Kernel::kRing:
      case Kernel::kOrderedRing:
      case Kernel::kBroadcast:
      case Kernel::kTransfer:
      case Kernel::kLowLatency:
        return true;
    }
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
  std::vector<std::vector<std::byte>> tensors_;
  cuda::OutputFloats output_floats_ = call_.kernel == Kernel::kReduceScatter
                                          ? cuda::OutputFloats::kOneShard
                                          : cuda::OutputFloats::kAllShards;
  HostBarrier have_started_{kWorldSize};
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

void gives_up(const KernelCall& call, Trouble trouble, const GivenUp& expected) {
  const nanoseconds timeout = trouble == Trouble::kIsAbsent ? kShort : kLong;
  HostGrid grid({.world_size = kWorldSize, .timeout_ns = static_cast<uint64_t>(timeout.count())});
  LaunchWithTrouble work(grid, call, trouble, expected.waiting);
  const auto begin = steady_clock::now();
  grid.run(1, work);
  const nanoseconds elapsed = steady_clock::now() - begin;
  check(!work.was_stopped(), call.to_string() + " did not give up by itself");
  const cuda::Failure failure = grid.failure(expected.waiting);
  const std::string what = join(call.to_string(), ", ", to_string(failure));
  check(failure.kind == failure_of(trouble), what);
  check(failure.phase == expected.phase, what);
  check_equal(static_cast<int>(failure.peer), expected.awaited, what + ": the awaited rank");
  check_equal(static_cast<int>(failure.rank), expected.waiting, what + ": the rank that waited");
  check(failure.channel < call.num_blocks, what);
  check_counts_nothing(grid, what);
  work.check_spoiled(what);
  if (trouble == Trouble::kHasAnotherLaunch) return;
  check(elapsed >= kShort, call.to_string() + " gave up too soon");
  if (trouble != Trouble::kIsAbsent) return;
  const cuda::Failure stall = grid.stall(expected.waiting);
  check(stall.kind == FailureKind::kStall, what + ": no word of a stall before");
  check_equal(static_cast<int>(stall.peer), expected.awaited, what + ": the awaited rank");
}

void every_kernel_gives_up(Trouble trouble) {
  constexpr WaitPhase kArrival = WaitPhase::kArrival;
  const bool is_absent = trouble != Trouble::kHasAnotherLaunch;
  // Rank 2, the odd rank's successor in rings, waits for it.
  const GivenUp by_next{kArrival, 2};
  for (const Kernel kernel :
       {Kernel::kOneShot, Kernel::kTwoShot, Kernel::kTwoShotInPlace, Kernel::kRing,
        Kernel::kHierarchical, Kernel::kReduceScatter, Kernel::kAllGather}) {
    gives_up({.kernel = kernel, .num_elems = 3000}, trouble, by_next);
  }
  // Here the odd rank receives from rank 0 before it sends anything.
  for (const Kernel kernel : {Kernel::kOrderedRing, Kernel::kBroadcast}) {
    gives_up({.kernel = kernel, .num_elems = 3000}, trouble,
             is_absent ? by_next : GivenUp{kArrival, kOdd, 0});
  }
  gives_up({.kernel = Kernel::kHierarchical, .num_elems = 3000, .group_size = 1}, trouble,
           {kArrival, 0});
  gives_up({.kernel = Kernel::kLowLatency, .num_elems = 200}, trouble, {WaitPhase::kPacket, 0});
  // The sender notices an absent receiver only once its slots are full.
  gives_up({.kernel = Kernel::kTransfer, .num_elems = 3000, .root = 0, .receiver = kOdd}, trouble,
           is_absent ? GivenUp{WaitPhase::kFreeSlot, 0} : GivenUp{kArrival, kOdd, 0});
  gives_up({.kernel = Kernel::kTransfer, .num_elems = 3000, .root = kOdd, .receiver = 0}, trouble,
           {kArrival, 0});
}

// The region's counts are what an executor leaves to graphs.
void writes_to_no_peer_when_retired(const KernelCall& call) {
  constexpr int kRank = 0;
  HostGrid grid({.world_size = kWorldSize, .timeout_ns = uint64_t{nanoseconds(kLong).count()}});
  const transport::DeviceGeometry& geometry = grid.peers(kRank).geometry;
  std::byte* region = grid.peers(kRank).regions[kRank];
  for (int channel = 0; channel < geometry.num_channels; ++channel) {
    for (int peer = 0; peer < kWorldSize; ++peer) {
      auto& end = *reinterpret_cast<transport::LinkEnd*>(region + geometry.link_end(channel, peer));
      end.counts.sent = end.counts.received = transport::kRetired;
    }
    reinterpret_cast<transport::ChannelState*>(region + geometry.channel_state(channel))
        ->packet_rounds = transport::kRetired;
  }
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
    const uint64_t num_elems = kernel == Kernel::kLowLatency ? 200 : 3000;
    writes_to_no_peer_when_retired({.kernel = kernel, .num_elems = num_elems});
  }
  writes_to_no_peer_when_retired(
      {.kernel = Kernel::kHierarchical, .num_elems = 3000, .group_size = 1});
}

// What it awaits arrives, and the sender leaves, after the kernel has looked for it and before the
// kernel reports that it waits: reading the clock comes between the two.
struct BlockHeldUpBeforeItsReport {
  uint32_t* num_left;
  bool* is_there;
  mutable uint64_t num_readings = 0;

  int index() const { return 0; }
  int local_rank() const { return 0; }
  void pause() const {}
  uint64_t now_ns() const {
    if (++num_readings == 3) {
      *is_there = true;
      *num_left = 1;
    }
    return 10 * num_readings;
  }
};

// A block that only tells the time.
struct WaitingBlock {
  int index() const { return 0; }
  int local_rank() const { return 0; }
  void pause() const {}
  uint64_t now_ns() const {
    return static_cast<uint64_t>(steady_clock::now().time_since_epoch() / nanoseconds(1));
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
  const BlockHeldUpBeforeItsReport block{&words.num_left, &is_there};
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
    {"kernel_timeout", [] { every_kernel_gives_up(Trouble::kIsAbsent); }},
    {"kernel_abort", [] { every_kernel_gives_up(Trouble::kIsAbsentUntilAbort); }},
    {"kernel_retired", no_kernel_writes_to_peers_when_retired},
    {"kernel_another_launch", [] { every_kernel_gives_up(Trouble::kHasAnotherLaunch); }},
};

}  // namespace
}  // namespace rota::test
