// Stresses the waiter's sleep and wake-up, which rests on one argument: it cannot be that the
// publisher sees nobody asleep and the sleeper sees nothing published (base/waiter.h).
//
// In the build named "endless" sleeps have no periodic tick, so a single lost wake-up hangs the
// program.

#include <atomic>

#include "base/waiter.h"
#include "check.h"
#include "random.h"
#include "ranks.h"

namespace rota::test {
namespace {

class Patience final : public WaitObserver {
 public:
  std::optional<Error> poll() override {
    ++num_polls;
    return std::nullopt;
  }
  std::optional<Error> tick(Nanoseconds waited) override {
    ++num_ticks;
    if (waited >= kPatience) return Error(ErrorKind::kTimeout, "the flag did not come");
    return std::nullopt;
  }

  int64_t num_polls = 0;
  int64_t num_ticks = 0;
};

// Flags of one rank, each on a cache line of its own.
struct Words {
  Flag flag{};
  Flag sleeping{};
  uint64_t payload = 0;  // plain memory, ordered by the flag
};

// Up to a few µs, so that the publication hits every stage of the sleeper.
void linger(int num_steps) {
  while (num_steps-- > 0) std::atomic_signal_fence(std::memory_order_seq_cst);
}

// Ranks pass a number around and add one each time; with a policy of zeros every wait sleeps.
void pass_around(int num_ranks, const WaitPolicy& policy, int num_laps, bool dawdles) {
  std::vector<Words> words(static_cast<size_t>(num_ranks));
  run_threads(num_ranks, [&](int rank) {
    Words& own = words[static_cast<size_t>(rank)];
    const Words& previous = words[static_cast<size_t>((rank + num_ranks - 1) % num_ranks)];
    std::vector<const Flag*> peers;
    for (const Words& peer : words) {
      if (&peer != &own) peers.push_back(&peer.sleeping);
    }
    Waiter waiter(&own.sleeping, peers);
    Patience patience;
    Random random(rank);
    for (int lap = 1; lap <= num_laps; ++lap) {
      const auto value = static_cast<uint64_t>(lap);
      if (rank > 0) {
        waiter.wait(previous.flag, value, policy, patience);
      } else if (lap > 1) {
        waiter.wait(previous.flag, value - 1, policy, patience);
      }
      const uint64_t before = rank == 0 && lap == 1 ? 0 : previous.payload;
      check_equal(before,
                  (value - 1) * static_cast<uint64_t>(num_ranks) + static_cast<uint64_t>(rank),
                  "what was passed on");
      own.payload = before + 1;
      if (dawdles) linger(random.below(2000));
      waiter.publish(own.flag, value);
    }
    check_equal(own.sleeping.load(), 0, "the sleep flag at rest");
  });
}

// Both sides wait for each other in every step, so both publish while the other goes to sleep.
void rendezvous(int num_steps) {
  Words words[2];
  run_threads(2, [&](int rank) {
    Words& own = words[rank];
    const Words& other = words[1 - rank];
    Waiter waiter(&own.sleeping, {&other.sleeping});
    Patience patience;
    Random random(rank);
    for (int step = 1; step <= num_steps; ++step) {
      linger(random.below(1000));
      waiter.publish(own.flag, static_cast<uint64_t>(step));
      waiter.wait(other.flag, static_cast<uint64_t>(step), WaitPolicy{}, patience);
    }
  });
}

void reached_flag_asks_nobody() {
  Words words;
  words.flag.publish(5);
  Flag sleeping{};
  Waiter waiter(&sleeping, {});
  Patience patience;
  waiter.wait(words.flag, 5, WaitPolicy{}, patience);
  check_equal(patience.num_polls + patience.num_ticks, 0, "calls of the observer");
}

// An error from the observer ends the wait, unless the flag is there by then.
class Complaint final : public WaitObserver {
 public:
  explicit Complaint(Flag* flag) : flag_(flag) {}
  std::optional<Error> poll() override { return complain(); }
  std::optional<Error> tick(Nanoseconds) override { return complain(); }

 private:
  std::optional<Error> complain() {
    if (flag_ != nullptr) flag_->publish(1);
    return Error(ErrorKind::kPeerFailed, "a complaint");
  }
  Flag* flag_;
};

void flag_has_the_last_word(const WaitPolicy& policy) {
  Flag flag{}, sleeping{};
  Waiter waiter(&sleeping, {});
  Complaint complaint(nullptr);
  expect_error(ErrorKind::kPeerFailed, [&] { waiter.wait(flag, 1, policy, complaint); });
  Complaint late(&flag);
  waiter.wait(flag, 1, policy, late);
}

// A wait that is over ends without an error, and one for a flag that comes does not end early.
void wait_may_be_given_up() {
  Words words;
  Waiter waiter(&words.sleeping, {});
  Patience patience;
  const Awaited awaited{&words.flag, 1};
  const auto wait = [&] {
    return waiter.wait_any({&awaited, 1}, WaitPolicy{}, patience, 3 * kTick);
  };
  check(!wait(), "the flag has not come");
  check(patience.num_ticks > 0, "the observer was not asked");
  check_equal(words.sleeping.load(), 0, "the sleep flag at rest");
  words.flag.publish(1);
  check(wait(), "the flag has come");
}

constexpr WaitPolicy kSleep{};
constexpr WaitPolicy kYield{.yield_for = std::chrono::seconds(100)};
constexpr WaitPolicy kSpin{.spin = std::chrono::seconds(100)};

const CaseTable kCases{
    {"waiter_sleeping-ws2", pass_around, 2, kSleep, 10000, false},
    {"waiter_sleeping-ws4", pass_around, 4, kSleep, 5000, false},
    {"waiter_sleeping_at_any_moment-ws2", pass_around, 2, kSleep, 10000, true},
    {"waiter_rendezvous-ws2", rendezvous, 20000},
    {"waiter_yielding-ws3", pass_around, 3, kYield, 3000, true},
    {"waiter_spinning-ws2", pass_around, 2, kSpin, 50, false},
    {"waiter_policy_of_ranks-ws4", pass_around, 4, WaitPolicy::for_ranks(4), 3000, true},
    {"waiter_reached_flag", reached_flag_asks_nobody},
    {"waiter_given_up", wait_may_be_given_up},
    {"waiter_error_spinning", flag_has_the_last_word, kSpin},
    {"waiter_error_yielding", flag_has_the_last_word, kYield},
    {"waiter_error_sleeping", flag_has_the_last_word, kSleep},
};

}  // namespace
}  // namespace rota::test
