// Ranks that share cores: when a wait sleeps instead of yielding.
#include "base/core_sharing.h"

#include <sched.h>

#include <atomic>
#include <thread>

#include "base/waiter.h"
#include "check.h"
#include "ranks.h"

namespace rota::test {
namespace {

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

int stay_here() {
  const int core = sched_getcpu();
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  check(sched_setaffinity(0, sizeof(cores), &cores) == 0, "sched_setaffinity");
  return core;
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
                check_equal(sleeping.load(), 0, "the sleep flag");
                check_equal(ticks.num_ticks.load(), 0, "ticks of the observer");
              });
}

const CaseTable kCases{
    {"core_sharing_sleeps_beside_work", wait_sleeps_beside, State::kWorks},
    {"core_sharing_sleeps_beside_sleeping", wait_sleeps_beside, State::kSleeps},
    {"core_sharing_yields_to_yielding", wait_yields_beside, 0, State::kYields},
    {"core_sharing_yields_if_apart", wait_yields_beside, 1, State::kWorks},
};

}  // namespace
}  // namespace rota::test
