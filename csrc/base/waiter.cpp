#include "base/waiter.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <climits>
#include <thread>

#include "base/cores.h"

namespace rota {
namespace {

using Clock = std::chrono::steady_clock;

// Checks of the flag per check of the abort words and the clock, which costs more.
constexpr int kSpinsPerPoll = 32;

// Another rank that needs this core has not got it after so many yields. Measured with 4 ranks on 2
// cores, each in a session of its own, and 4 KiB: dist.gather takes 95 us if ranks only yield, 66
// with 1 yield in vain, 57 with 10; Communicator.gather 7.7, 12 and 9.
constexpr int kYieldsInVain = 10;

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// A futex is 32 bits wide, so this is the half of the flag that changes with every step.
uint32_t* futex_word(const Flag& flag) {
  auto* halves = reinterpret_cast<uint32_t*>(const_cast<uint64_t*>(&flag.value));
  return halves + (std::endian::native == std::endian::little ? 0 : 1);
}

void wake_all_at(const uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Says what this rank does in place of working, for as long as this lives.
class SharedCoreWait {
 public:
  // sharing: null where nobody wants to know.
  explicit SharedCoreWait(CoreSharing* sharing) : sharing_(sharing) {
    if (sharing_ != nullptr) sharing_->record(CoreWord::State::kYields);
  }
  ~SharedCoreWait() {
    if (sharing_ != nullptr) sharing_->record(CoreWord::State::kWorks);
  }
  SharedCoreWait(const SharedCoreWait&) = delete;
  SharedCoreWait& operator=(const SharedCoreWait&) = delete;

  void begin_sleeps() const {
    if (sharing_ != nullptr) sharing_->record(CoreWord::State::kSleeps);
  }
  bool is_in_the_way() const { return sharing_ != nullptr && sharing_->is_needed_by_other(); }

 private:
  CoreSharing* sharing_;
};

struct SeenWord {
  const uint32_t* word;
  uint32_t seen;
};

// Whether a sleep did not take place. An older Linux says ENOSYS; what a sandbox says is up to its
// rules, mostly EPERM. A sleep that is taken for done would be a spin.
bool is_refused(long result) {
  return result < 0 && errno != EAGAIN && errno != ETIMEDOUT && errno != EINTR;
}

// Both return at once if a word no longer has its `seen` value. After a timeout, a wake-up or a
// signal the caller's loop checks again.
void sleep_on(const SeenWord& at) {
  const timespec tick{.tv_sec = 0, .tv_nsec = kTick.count()};
  const long result = syscall(SYS_futex, at.word, FUTEX_WAIT, at.seen, &tick, nullptr, 0);
  if (is_refused(result)) std::this_thread::sleep_for(kTick);
}

void sleep_on_any(std::span<const SeenWord> words) {
#ifdef SYS_futex_waitv  // Linux 5.16
  std::array<futex_waitv, Waiter::kMaxAwaited> waits;
  for (size_t i = 0; i < words.size(); ++i) {
    waits[i] = {.val = words[i].seen,
                .uaddr = reinterpret_cast<uint64_t>(words[i].word),
                .flags = FUTEX_32,
                .__reserved = 0};
  }
  timespec end{};
  clock_gettime(CLOCK_MONOTONIC, &end);
  const int64_t nanoseconds = end.tv_nsec + kTick.count();
  constexpr int64_t kSecond = Nanoseconds(std::chrono::seconds(1)).count();
  end.tv_sec += nanoseconds / kSecond;
  end.tv_nsec = nanoseconds % kSecond;
  const long result =
      syscall(SYS_futex_waitv, waits.data(), words.size(), 0, &end, CLOCK_MONOTONIC);
  if (!is_refused(result)) return;
#endif
  // This wakes up only for the first word; a change of the others is noticed at the next tick.
  sleep_on(words[0]);
}

}  // namespace

// Measured with benchmarks/collectives.py on 2 cores kept busy by other programs: the ranks then
// often share one core, and each wait costs twice its spin (4 bytes, p50: 102 us with a spin of 50
// us, 24 with 10, 6 with 2, 4 with 1). On idle cores the flag usually arrives within 2 us.
WaitPolicy WaitPolicy::for_ranks(int num_ranks) {
  using std::chrono::microseconds;
  const bool own_core = num_ranks <= num_usable_cores();
  return {.spin = microseconds(own_core ? 2 : 0),
          .yield_for = microseconds(200),
          .shares_cores = !own_core};
}

Waiter::Waiter(Flag* own_sleeping, std::vector<const Flag*> peers_sleeping,
               CoreSharing* core_sharing)
    : own_sleeping_(own_sleeping),
      peers_sleeping_(std::move(peers_sleeping)),
      core_sharing_(core_sharing) {}

void Waiter::wake_all(const Flag& flag) { wake_all_at(futex_word(flag)); }

bool Waiter::wait_any(std::span<const Awaited> awaited, const WaitPolicy& policy,
                      WaitObserver& observer, std::optional<Nanoseconds> patience) {
  const auto start = Clock::now();
  const auto spin_end = start + policy.spin;
  const auto yield_end = spin_end + policy.yield_for;
  const auto arrived = [&] { return std::ranges::any_of(awaited, &Awaited::is_there); };
  // A peer that published before it died or left has done its part, so an arrived flag overrides an
  // error.
  const auto check = [&](const std::optional<Error>& error) {
    if (error && !arrived()) throw *error;
  };

  for (auto now = start; now < spin_end; now = Clock::now()) {
    for (int i = 0; i < kSpinsPerPoll; ++i) {
      if (arrived()) return true;
      cpu_relax();
    }
    check(observer.poll());
  }
  const SharedCoreWait shared_core(policy.shares_cores ? core_sharing_ : nullptr);
  int num_yields_in_vain = 0;
  for (auto now = Clock::now(); now < yield_end; now = Clock::now()) {
    if (arrived()) return true;
    sched_yield();
    check(observer.poll());
    num_yields_in_vain = shared_core.is_in_the_way() ? num_yields_in_vain + 1 : 0;
    if (num_yields_in_vain == kYieldsInVain) break;
  }
  std::vector<const LifeWord*> lives = observer.lives();
  std::erase(lives, nullptr);
  // The kernel wakes one sleeper, who wakes the others.
  const auto is_over = [](const LifeWord* life) {
    if (!life->is_ending()) return false;
    wake_all_at(&life->value);
    return true;
  };
  auto next_tick = yield_end;
  shared_core.begin_sleeps();
  while (!arrived()) {
    const auto now = Clock::now();
    if (patience && now - start >= *patience) return false;
    if (now >= next_tick) {
      check(observer.tick(now - start));
      next_tick = now + kTick;
    } else {
      check(observer.poll());
    }
    sleep(awaited, lives);
    if (std::erase_if(lives, is_over) > 0) next_tick = now;
  }
  return true;
}

void Waiter::sleep(std::span<const Awaited> awaited, const std::vector<const LifeWord*>& lives) {
  change_num_sleepers(1);
  std::array<SeenWord, kMaxAwaited> words;
  size_t num_words = 0;
  bool is_there = false;
  for (const Awaited& each : awaited) {
    const uint64_t seen = each.flag->load_ordered();
    is_there |= seen >= each.target;
    words[num_words++] = {futex_word(*each.flag), static_cast<uint32_t>(seen)};
  }
  for (const LifeWord* life : lives) {
    const uint32_t seen = life->load();
    if (num_words < words.size() && LifeWord::is_held(seen)) {
      words[num_words++] = {&life->value, seen};
    }
  }
  if (!is_there) sleep_on_any({words.data(), num_words});
  change_num_sleepers(-1);
}

void Waiter::change_num_sleepers(int change) {
  const std::lock_guard lock(mutex_);
  num_sleepers_ += change;
  const uint64_t is_asleep = num_sleepers_ > 0 ? 1 : 0;
  if (own_sleeping_->load() != is_asleep) own_sleeping_->publish(is_asleep);
}

}  // namespace rota
