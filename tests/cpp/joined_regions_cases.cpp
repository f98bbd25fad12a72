// Releasing memory that GPUs of several ranks write into: in which order ranks let go of it, and
// whom they wait for. There is no GPU here; the regions are stubs that notice their release.
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "check.h"
#include "core/device_monitor.h"
#include "core/joined_regions.h"
#include "ranks.h"

namespace rota::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLate{100};
constexpr milliseconds kPrompt{1500};  // shorter than ranks wait for an absent one

// What all ranks have done so far.
struct Progress {
  std::atomic<int> num_done{0};      // ranks whose kernels have ended
  std::atomic<int> num_unmapped{0};  // ranks that map only their own region
};

// One rank's regions. Each part checks, when it is released, how far all ranks have come.
transport::DeviceRegions make_regions(Progress& progress, int world_size,
                                      std::atomic<bool>& is_right) {
  static int nothing;
  const auto on_drop = [](auto action) {
    return std::shared_ptr<void>(&nothing, [action](void*) { action(); });
  };
  return {.means = "nothing",
          .own = on_drop([&, world_size] {
            if (progress.num_unmapped != world_size) is_right = false;
          }),
          .mapped = on_drop([&, world_size] {
            if (progress.num_done != world_size) is_right = false;
            ++progress.num_unmapped;
          })};
}

Clock::duration time_to_drop(std::optional<JoinedRegions>& regions) {
  const auto begin = Clock::now();
  regions.reset();
  return Clock::now() - begin;
}

// Each rank in turn is the last one.
void nobody_frees_what_others_use() {
  constexpr int kWorldSize = 3;
  for (int late = 0; late < kWorldSize; ++late) {
    Progress progress;
    std::atomic<bool> is_right{true};
    run_ranks(kWorldSize, [&](Communicator& communicator) {
      const JoinedRegions regions(communicator, make_regions(progress, kWorldSize, is_right));
      if (communicator.rank() == late) std::this_thread::sleep_for(kLate);
      ++progress.num_done;
    });
    check(is_right, "a region was unmapped or freed while others used it");
  }
}

// As when GPUs are joined again because the first attempt did not prove to work.
void regions_can_be_made_anew() {
  for (int i = 0; i < 20; ++i) {
    Progress progress[2];
    std::atomic<bool> is_right{true};
    run_ranks(2, [&](Communicator& communicator) {
      for (Progress& one : progress) {
        const JoinedRegions regions(communicator, make_regions(one, 2, is_right));
        ++one.num_done;
      }
    });
    check(is_right, "a region was unmapped or freed while others used it");
  }
}

// The rank has released its regions before, or never had any.
void a_rank_that_has_left_is_not_waited_for() {
  Progress progress;
  std::atomic<bool> is_right{true};
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) return;
    std::optional<JoinedRegions> regions(std::in_place, communicator,
                                         make_regions(progress, 1, is_right));
    ++progress.num_done;
    check(time_to_drop(regions) < kPrompt, "waited for a rank that has left");
  });
  check(is_right, "regions were let go of in another order");
}

// Of a rank that has failed: they end late.
DeviceMonitor::Kernels ending_kernels(Progress& progress) {
  return {.failure = [] { return std::nullopt; },
          .take_stall = [] { return std::nullopt; },
          .set_num_left = [](int) {},
          .abort = [] {},
          .have_ended =
              [&progress, end = Clock::now() + kLate] {
                if (Clock::now() < end) return false;
                ++progress.num_done;
                return true;
              }};
}

// Rank 1 keeps its regions until rank 0 has released its own.
Clock::duration time_to_drop_alone(bool has_failed) {
  Progress progress;
  std::atomic<bool> is_right{true}, is_through{false};
  std::atomic<Clock::duration> time{};
  run_ranks(2, [&](Communicator& communicator) {
    std::optional<JoinedRegions> regions(std::in_place, communicator,
                                         make_regions(progress, 1, is_right));
    if (communicator.rank() == 1) {
      std::optional<DeviceMonitor> monitor;
      if (has_failed) {
        communicator.abort("on purpose");
        monitor.emplace(communicator, ending_kernels(progress));
      }
      is_through.wait(false);
      return;
    }
    ++progress.num_done;
    time = time_to_drop(regions);
    const int num_done = progress.num_done;
    is_through = true;
    is_through.notify_all();
    check(num_done == 2 || !has_failed, "a region was freed under a failed rank's kernels");
  });
  return time;
}

void a_rank_that_does_not_come_is_waited_for_once() {
  const auto time = time_to_drop_alone(false);
  check(time > kPrompt, "did not wait for a rank that is alive");
  check(time < 2 * kPrompt, "waited for it in both steps");
}

void a_rank_that_has_failed_is_waited_for_until_its_kernels_have_ended() {
  check(time_to_drop_alone(true) < kPrompt, "waited long in a group that has failed");
}

// The leaving rank's kernels have ended, so a peer's kernel waits for it in vain, while it waits
// for that peer.
void kernels_do_not_wait_for_a_rank_that_leaves() {
  std::atomic<bool> is_watched{false};
  run_ranks(2, [&](Communicator& communicator) {
    std::optional<JoinedRegions> regions(std::in_place, communicator, transport::DeviceRegions{});
    if (communicator.rank() == 0) {
      is_watched.wait(false);
      check(time_to_drop(regions) < kPrompt, "a kernel waited for a rank that does not come");
      return;
    }
    std::atomic<bool> is_aborted{false};
    const cuda::Failure stall{.kind = cuda::FailureKind::kStall,
                              .phase = cuda::WaitPhase::kArrival,
                              .peer = 0,
                              .rank = 1,
                              .channel = 0,
                              .num_left = 1};
    const DeviceMonitor monitor(communicator, {.failure = [] { return std::nullopt; },
                                               .take_stall = [&] { return stall; },
                                               .set_num_left = [](int) {},
                                               .abort =
                                                   [&] {
                                                     is_aborted = true;
                                                     is_aborted.notify_all();
                                                   },
                                               .have_ended = [] { return true; }});
    is_watched = true;
    is_watched.notify_all();
    is_aborted.wait(false);
    const Error error =
        expect_error(ErrorKind::kPeerFailed, [&] { communicator.check_usable("all_reduce"); });
    check_contains(error.what(), "has left the group");
  });
}

const CaseTable kCases{
    {"joined_regions_order", nobody_frees_what_others_use},
    {"joined_regions_anew", regions_can_be_made_anew},
    {"joined_regions_departure", a_rank_that_has_left_is_not_waited_for},
    {"joined_regions_absence", a_rank_that_does_not_come_is_waited_for_once},
    {"joined_regions_failure", a_rank_that_has_failed_is_waited_for_until_its_kernels_have_ended},
    {"joined_regions_kernels", kernels_do_not_wait_for_a_rank_that_leaves},
};

}  // namespace
}  // namespace rota::test
