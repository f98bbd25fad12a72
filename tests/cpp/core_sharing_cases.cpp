// Ranks that share cores: when a wait sleeps instead of yielding, and who moves to another core.
#include "base/core_sharing.h"

#include <sched.h>

#include <atomic>
#include <thread>

#include "base/cores.h"
#include "base/waiter.h"
#include "check.h"
#include "ranks.h"

namespace rota::test {
namespace {

using Clock = std::chrono::steady_clock;
using State = CoreWord::State;

constexpr WaitPolicy kYield{.yield_for = kPatience, .shares_cores = true};

class Ticks final : public WaitObserver {
 public:
  std::optional<Error> poll() override { return std::nullopt; }
  std::optional<Error> tick(Nanoseconds) override {
    ++num_ticks;
    return std::nullopt;
  }

  std::atomic<int> num_ticks = 0;
};

// Keeps this thread on the core where it is.
int stay_here() {
  const int core = sched_getcpu();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  check(sched_setaffinity(0, sizeof(cores), &cores) == 0, "sched_setaffinity");
  return core;
}

template <typename Condition>
void await(const Condition& condition, const char* what) {
  const auto end = Clock::now() + kPatience;
  while (!condition()) {
    check(Clock::now() < end, what);
    sched_yield();
  }
}

// A rank waits, while another one is in this state so many cores further on.
template <typename Meanwhile>
void wait_beside(int cores_apart, State state, Meanwhile meanwhile) {
  Flag flag{}, sleeping{};
  CoreWord own{}, other{};
  Ticks ticks;
  std::atomic<int> core = -1;
  std::thread rank([&] {
    core = stay_here();
    other.record({core + cores_apart, state});
    CoreSharing sharing(&own, {&other});
    Waiter waiter(&sleeping, {}, &sharing);
    waiter.wait(flag, 1, kYield, ticks);
  });
  const auto await_state = [&](State state, const char* what) {
    await([&] { return own.load() == CoreWord::Place{core, state}; }, what);
  };
  meanwhile(sleeping, ticks, await_state);
  Waiter(nullptr, {&sleeping}).publish(flag, 1);
  rank.join();
  await_state(State::kWorks, "the rank says that it works");
}

void wait_sleeps_beside(State state) {
  wait_beside(0, state, [](const Flag& sleeping, const Ticks&, const auto& await_state) {
    await([&] { return sleeping.load() == 1; }, "the rank sleeps");
    await_state(State::kSleeps, "the rank says that it sleeps, and where");
  });
}

void wait_yields_beside(int cores_apart, State state) {
  wait_beside(cores_apart, state,
              [](const Flag& sleeping, const Ticks& ticks, const auto& await_state) {
                await_state(State::kYields, "the rank says that it yields, and where");
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
                check_equal(sleeping.load(), uint64_t{0}, "the sleep flag");
                check_equal(ticks.num_ticks.load(), 0, "ticks of the observer");
              });
}

// The core to which `rank` should move, or -1.
int target_of(const RankOnCore& rank, const std::vector<RankOnCore>& others) {
  return emptier_core(rank, others).value_or(-1);
}

void cores_with_two_ranks_less_are_emptier() {
  const auto target = [](int core, const std::vector<int>& others) {
    std::vector<RankOnCore> ranks;
    for (const int each : others) ranks.push_back({each});
    return target_of({core}, ranks);
  };
  check_equal(target(0, {0, 0, 1}), 1, "three beside one");
  check_equal(target(5, {5, 2, 5, 2, 3, 5, 5}), 3, "the one with the fewest");
  check_equal(target(0, {0, 1, 1}), -1, "two beside two");
  check_equal(target(0, {0, 1}), -1, "two beside one");
  check_equal(target(0, {0, 0, 0}), -1, "no rank elsewhere");
  check_equal(target(0, {1, 1, 1}), -1, "alone");
  check_equal(target(0, {}), -1, "no other rank");
}

void core_of_a_heavy_rank_is_fuller() {
  check_equal(target_of({0}, {{0, 3}, {1}, {1}}), 1, "beside the root");
  check_equal(target_of({1}, {{0, 3}, {1}, {1}}), -1, "three, but not beside the root");
  check_equal(target_of({0, 3}, {{0}, {1}, {1}}), -1, "the root itself stays");
  check_equal(target_of({0}, {{0, 1}, {1}, {1}}), -1, "a little more to do");
  check_equal(target_of({0, 3}, {{0}, {0}, {1}}), 1, "the root leaves two");
  check_equal(target_of({2}, {{0, 9}, {2}, {2}, {1}}), 1, "not to the root");
}

// Linux may move the thread on at once.
void go_to(int core) {
  await([&] { return move_to_core(core) && sched_getcpu() == core; }, "the thread has moved");
}

void thread_moves_and_stays_free() {
  const std::vector<int> cores = usable_cores();
  for (const int core : cores) go_to(core);
  check(usable_cores() == cores, "the cores that it may use are the same");
  check(!move_to_core(-1), "there is no such core");
  if (cores.size() < 2) return;
  std::thread([&] {
    const int core = stay_here();
    check(!move_to_core(core == cores[0] ? cores[1] : cores[0]), "it may not use that one");
  }).join();
}

// A rank and two others, and a third one elsewhere. Where there are not two cores, they do nothing.
class ThreeBesideOne {
 public:
  ThreeBesideOne() {
    for (int i = 0; i < 3; ++i) others_[i].record({cores_[i < 2 ? 0 : 1], State::kYields});
  }

  void forget_one() { others_[2] = {}; }
  // Of the one elsewhere.
  void let_one_copy(uint64_t num_bytes) {
    CoreSharing(&others_[2], {}).record_extra_bytes(num_bytes);
  }
  void let_run(size_t num_running) { num_running_ = num_running; }

  // From the core with three.
  void spread(Clock::time_point now = Clock::now()) {
    go_to(cores_[0]);
    sharing_.spread(now);
  }
  // It says where it is once it has.
  bool has_moved() const { return own_.load().has_value(); }
  int num_looks() const { return num_looks_; }

 private:
  const std::vector<int> cores_ = usable_cores();
  CoreWord own_{}, others_[3]{};
  size_t num_running_ = 4;
  int num_looks_ = 0;  // at what runs
  CoreSharing sharing_{&own_, {&others_[0], &others_[1], &others_[2]}, [this] {
                         ++num_looks_;
                         return num_running_;
                       }};
};

void crowded_rank_moves() {
  if (num_usable_cores() < 2) return;
  const auto spread = [](auto change) {
    ThreeBesideOne ranks;
    change(ranks);
    ranks.spread();
    return ranks.has_moved();
  };
  await([&] { return spread([](ThreeBesideOne&) {}); }, "the rank moves");
  check(!spread([](ThreeBesideOne& ranks) { ranks.let_run(5); }), "another program runs");
  check(!spread([](ThreeBesideOne& ranks) { ranks.forget_one(); }), "one rank is not known");
  const auto spread_beside = [&](uint64_t num_bytes) {
    return spread([&](ThreeBesideOne& ranks) { ranks.let_one_copy(num_bytes); });
  };
  check(!spread_beside(CoreSharing::kBytesPerWeight), "the one elsewhere has as much to do");
  await([&] { return spread_beside(CoreSharing::kBytesPerWeight - 1); }, "it has less to do");
}

void rank_looks_only_now_and_then() {
  if (num_usable_cores() < 2) return;
  ThreeBesideOne ranks;
  ranks.let_run(5);
  const auto start = Clock::now();
  const auto looks = [&](Clock::time_point now) {
    const int before = ranks.num_looks();
    ranks.spread(now);
    return ranks.num_looks() > before;
  };
  await([&] { return looks(start); }, "the first look");
  check(!looks(start + CoreSharing::kMovesEvery / 2), "too early");
  await([&] { return looks(start + 2 * CoreSharing::kMovesEvery); }, "the next one");
}

const CaseTable kCases{
    {"core_sharing_sleeps_beside_work", [] { wait_sleeps_beside(State::kWorks); }},
    {"core_sharing_sleeps_beside_sleeping", [] { wait_sleeps_beside(State::kSleeps); }},
    {"core_sharing_yields_to_yielding", [] { wait_yields_beside(0, State::kYields); }},
    {"core_sharing_yields_if_apart", [] { wait_yields_beside(1, State::kWorks); }},
    {"core_sharing_emptier_core", cores_with_two_ranks_less_are_emptier},
    {"core_sharing_heavy_rank", core_of_a_heavy_rank_is_fuller},
    {"core_sharing_moving", thread_moves_and_stays_free},
    {"core_sharing_spreading", crowded_rank_moves},
    {"core_sharing_spreading_rarely", rank_looks_only_now_and_then},
};

}  // namespace
}  // namespace rota::test
