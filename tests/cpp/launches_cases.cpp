// Collectives on GPUs as the host sees them: ranks post what they queue, and learn when a kernel or
// another rank has given up. There is no GPU here; the tests use stub kernels.
#include <algorithm>
#include <atomic>
#include <iostream>
#include <latch>
#include <memory>
#include <sstream>
#include <thread>

#include "check.h"
#include "core/device_monitor.h"
#include "random.h"
#include "ranks.h"

namespace rota::test {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kNumPosts = decltype(transport::ControlBlock::launches)::kNumPosts;
constexpr uint64_t kManyLaunches = 3 * kNumPosts;

Call launch_number(uint64_t number) {
  return {.kind = CollectiveKind::kAllReduce, .num_elems = number};
}

void post_many_launches(Communicator& communicator, uint64_t num_launches, int seed) {
  Random random(seed);
  for (uint64_t i = 0; i < num_launches; ++i) {
    if (random.below(16) == 0) std::this_thread::yield();
    communicator.post_launch(launch_number(i));
  }
}

// Ranks run as far ahead of each other as they may, and posts are reused.
void equal_launches_agree(int world_size) {
  run_ranks(world_size, [](Communicator& communicator) {
    post_many_launches(communicator, kManyLaunches, communicator.rank());
    check_equal(communicator.num_posted_launches(), kManyLaunches, "launches");
  });
}

// The later rank gets the error at once, the earlier ones at their next call.
void another_launch_is_a_mismatch() {
  for (int seed = 0; seed < 20; ++seed) {
    std::atomic<int> num_mismatches{0};
    run_ranks(3, [&](Communicator& communicator) {
      post_many_launches(communicator, 150, seed);
      const bool is_odd = communicator.rank() == 1;
      try {
        communicator.post_launch(launch_number(is_odd ? 1001 : 1000));
      } catch (const Error& error) {
        check(error.kind() == ErrorKind::kMismatch, error.what());
        check_contains(error.what(), "rank 1 called all_reduce(sum, uint8[1001]");
        ++num_mismatches;
        expect_error(ErrorKind::kMismatch, [&] { communicator.post_launch(launch_number(2000)); },
                     {"the group is dead"});
      }
    });
    check(num_mismatches >= 1, "nobody saw that ranks disagree");
  }
}

void a_rank_too_far_ahead_waits() {
  std::latch may_follow(1);
  run_ranks(2, [&](Communicator& communicator) {
    if (communicator.rank() == 1) {
      may_follow.wait();
      return post_many_launches(communicator, kNumPosts + 2, 1);
    }
    post_many_launches(communicator, kNumPosts, 0);
    std::atomic<bool> is_through{false};
    std::thread ahead([&] {
      communicator.post_launch(launch_number(kNumPosts));
      is_through = true;
    });
    // Long enough for a thread that need not wait to get its turn on a machine full of others.
    const auto give_up = std::chrono::steady_clock::now() + milliseconds(200);
    while (!is_through && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
    const bool was_early = is_through;
    may_follow.count_down();
    ahead.join();
    check(!was_early, "a post was written anew that a rank has not read");
    communicator.post_launch(launch_number(kNumPosts + 1));
  });
}

void a_rank_that_does_not_follow_is_a_timeout() {
  std::latch has_failed(1);
  run_ranks(2,
            [&](Communicator& communicator) {
              if (communicator.rank() == 1) {
                has_failed.wait();
                return;
              }
              expect_error(ErrorKind::kTimeout,
                           [&] { post_many_launches(communicator, kNumPosts + 1, 0); },
                           {"queueing on the GPU"});
              has_failed.count_down();
            },
            {.timeout = milliseconds(200)});
}

void transfers_agree_pair_by_pair() {
  run_ranks(3, [](Communicator& communicator) {
    const int rank = communicator.rank();
    for (uint64_t i = 0; i < 50; ++i) {
      const Call transfer{.kind = CollectiveKind::kSendRecv, .num_elems = i};
      communicator.post_transfer(transfer, rank, (rank + 1) % 3);
      communicator.post_transfer(transfer, (rank + 2) % 3, rank);
    }
  });
}

void another_length_is_a_mismatch_of_the_pair() {
  std::atomic<int> num_mismatches{0};
  run_ranks(3, [&](Communicator& communicator) {
    const int rank = communicator.rank();
    if (rank == 1) return;
    try {
      const uint64_t num_elems = rank == 0 ? 10 : 12;
      communicator.post_transfer({.kind = CollectiveKind::kSendRecv, .num_elems = num_elems}, 0, 2);
    } catch (const Error& error) {
      check(error.kind() == ErrorKind::kMismatch, error.what());
      check_contains(error.what(),
                     "rank 0 called send_recv(uint8[10]); rank 2 called send_recv(uint8[12])");
      ++num_mismatches;
    }
  });
  check(num_mismatches >= 1, "nobody saw that ranks disagree");
}

// A stub for an executor whose kernels wait until they are aborted.
struct FakeKernels {
  std::atomic<uint64_t> failure{0};
  std::atomic<uint64_t> stall{0};
  std::atomic<bool> is_aborted{false};
  std::atomic<int> num_left{0};

  // Acts like a kernel of rank `rank` that repeatedly reports its wait for `peer`.
  void wait_for(uint16_t rank, uint16_t peer) { report(rank, peer, num_left); }
  // Like one that was held up between its last look, before it knew who left, and its report.
  void report_late(uint16_t rank, uint16_t peer) { report(rank, peer, 0); }

  void report(uint16_t rank, uint16_t peer, int known_to_have_left) {
    stall = cuda::Failure{.kind = cuda::FailureKind::kStall,
                          .phase = cuda::WaitPhase::kFreeSlot,
                          .peer = peer,
                          .rank = rank,
                          .channel = 5,
                          .num_left = static_cast<uint8_t>(known_to_have_left)}
                .pack();
    std::this_thread::sleep_for(milliseconds(5));
  }

  DeviceMonitor::Kernels kernels() {
    return {.failure = [this] { return cuda::Failure::unpack_any(failure); },
            .take_stall = [this] { return cuda::Failure::unpack_any(stall.exchange(0)); },
            .set_num_left = [this](int value) { num_left = value; },
            .abort =
                [this] {
                  is_aborted = true;
                  is_aborted.notify_all();
                },
            .have_ended = [] { return true; }};
  }
};

// A kernel's failure on one rank ends the kernels of all ranks; every later call gets that error.
void a_kernel_that_gives_up_ends_the_group(cuda::FailureKind kind, ErrorKind expected,
                                           std::string_view fact) {
  std::latch all_posted(3);  // a rank that posts its first launch after the failure gets the error
  run_ranks(3, [&](Communicator& communicator) {
    FakeKernels fake;
    const DeviceMonitor monitor(communicator, fake.kernels());
    communicator.post_launch(launch_number(1));
    all_posted.arrive_and_wait();
    if (communicator.rank() == 2) {
      fake.failure =
          cuda::Failure{
              .kind = kind, .phase = cuda::WaitPhase::kArrival, .peer = 1, .rank = 2, .channel = 5}
              .pack();
    }
    fake.is_aborted.wait(false);
    expect_error(expected, [&] { communicator.post_launch(launch_number(2)); }, {fact});
  });
}

// Kernels report a wait repeatedly; the user is told once, unless reports stop for 500 ms.
void a_kernel_that_waits_long_names_whom_it_awaits() {
  std::ostringstream output;
  const std::unique_ptr<std::streambuf, void (*)(std::streambuf*)> before(
      std::cerr.rdbuf(output.rdbuf()), [](std::streambuf* buffer) { std::cerr.rdbuf(buffer); });
  const auto begin = std::chrono::steady_clock::now();
  std::latch is_over(1);
  run_ranks(2, [&](Communicator& communicator) {
    FakeKernels fake;
    const DeviceMonitor monitor(communicator, fake.kernels());
    communicator.post_launch(launch_number(1));
    if (communicator.rank() == 1) return is_over.wait();
    check(!monitor.is_stalled(), "a wait before there is one");
    while (!monitor.is_stalled()) fake.wait_for(0, 1);
    for (int i = 0; i < 20; ++i) fake.wait_for(0, 1);
    is_over.count_down();
  });
  const std::string text = output.str();
  check_contains(text, "rank 0/2 has waited 1 s for a free slot of rank 1");
  check_contains(text, "in channel 5");
  const auto most_pauses = (std::chrono::steady_clock::now() - begin) / milliseconds(500);
  check(std::count(text.begin(), text.end(), '\n') <= 1 + most_pauses, "told once");
}

void an_abort_ends_kernels() {
  run_ranks(2, [](Communicator& communicator) {
    FakeKernels fake;
    const DeviceMonitor monitor(communicator, fake.kernels());
    if (communicator.rank() == 1) communicator.abort("enough");
    fake.is_aborted.wait(false);
    expect_error(communicator.rank() == 1 ? ErrorKind::kInternal : ErrorKind::kPeerFailed,
                 [&] { communicator.post_launch(launch_number(1)); });
  });
}

// A rank that has left is no error as long as no kernel waits for it, whatever is queued.
void a_rank_that_leaves_ends_kernels_that_wait_for_it() {
  std::latch has_waited(1);
  run_ranks(3, [&](Communicator& communicator) {
    if (communicator.rank() == 0) return;
    FakeKernels fake;
    const DeviceMonitor monitor(communicator, fake.kernels());
    if (communicator.rank() == 1) {
      for (int i = 0; i < 40; ++i) fake.wait_for(1, 2);
      check(!fake.is_aborted, "aborted, though no kernel waits for the rank that left");
      return has_waited.count_down();
    }
    has_waited.wait();
    check(!fake.is_aborted, "aborted, though no kernel waits");
    for (int i = 0; i < 40; ++i) fake.report_late(2, 0);
    check(!fake.is_aborted, "aborted, though its data may have arrived since the kernel looked");
    while (!fake.is_aborted) fake.wait_for(2, 0);
    expect_error(ErrorKind::kPeerFailed, [&] { communicator.post_launch(launch_number(1)); },
                 {"has left the group"});
  });
}

const CaseTable kCases{
    {"launches_agree-ws2", equal_launches_agree, 2},
    {"launches_agree-ws4", equal_launches_agree, 4},
    {"launches_mismatch", another_launch_is_a_mismatch},
    {"launches_too_far_ahead", a_rank_too_far_ahead_waits},
    {"launches_timeout", a_rank_that_does_not_follow_is_a_timeout},
    {"launches_transfers", transfers_agree_pair_by_pair},
    {"launches_transfer_mismatch", another_length_is_a_mismatch_of_the_pair},
    {"monitor_timeout", a_kernel_that_gives_up_ends_the_group, cuda::FailureKind::kTimeout,
     ErrorKind::kTimeout, "for data of rank 1 (a thread) in channel 5"},
    {"monitor_another_launch", a_kernel_that_gives_up_ends_the_group, cuda::FailureKind::kMismatch,
     ErrorKind::kMismatch, "its kernel met that of another collective of rank 1"},
    {"monitor_stall", a_kernel_that_waits_long_names_whom_it_awaits},
    {"monitor_abort", an_abort_ends_kernels},
    {"monitor_departure", a_rank_that_leaves_ends_kernels_that_wait_for_it},
};

}  // namespace
}  // namespace rota::test
