// The one way to wait: a short spin, then yield, then futex. Every wait polls for an abort, meets a
// deadline and lets a signal through, by way of its WaitObserver.
//
// Who wakes a sleeper: a waiting rank sets `sleeping` in its own region, looks at the flag once
// more and only then sleeps on it; a publisher stores the flag and then looks at `sleeping` of
// every peer. All four accesses are sequentially consistent, so at least one side sees the other. A
// sleep lasts kTick at most, in which the observer runs, so a lost wake-up could cost a tick and
// never a hang.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/flag.h"

namespace rota {

using Nanoseconds = std::chrono::nanoseconds;

inline constexpr Nanoseconds kTick = std::chrono::milliseconds(1);
static_assert(kTick < std::chrono::seconds(1), "a timespec's nanoseconds");

// What a wait must notice besides its flag.
class WaitObserver {
 public:
  virtual ~WaitObserver() = default;

  // Called often while spinning, so it must cost no system call. An error ends the wait.
  virtual std::optional<Error> poll() = 0;

  // Called about once per kTick of sleep. May throw what interrupts the wait (a Python signal).
  virtual std::optional<Error> tick(Nanoseconds waited) = 0;
};

struct WaitPolicy {
  Nanoseconds spin{0};       // busy wait; nothing else runs on this core meanwhile
  Nanoseconds yield_for{0};  // sched_yield in a loop: as fast as spinning when ranks share a core

  // Spinning is only right while every rank has a core.
  static WaitPolicy for_ranks(int num_ranks);
};

// A flag, and the value that ends a wait for it.
struct Awaited {
  const Flag* flag;
  uint64_t target;

  bool is_there() const { return flag->load() >= target; }
};

// Of one rank; its threads may share it.
class Waiter {
 public:
  // own: this rank's sleep flag, which peers read. peers: theirs, which publish() reads.
  Waiter(Flag* own_sleeping, std::vector<const Flag*> peers_sleeping);

  // Makes everything written before visible to whoever sees `value`, and wakes sleepers.
  void publish(Flag& flag, uint64_t value) {
    flag.publish(value);
    for (const Flag* sleeping : peers_sleeping_) {
      if (sleeping->load_ordered() != 0) return wake_all(flag);
    }
  }

  // Returns when flag >= target; throws what the observer reports if the flag is not there then.
  void wait(const Flag& flag, uint64_t target, const WaitPolicy& policy, WaitObserver& observer) {
    const Awaited awaited{&flag, target};
    if (!awaited.is_there()) wait_any({&awaited, 1}, policy, observer);
  }

  // Returns when at least one of them is there, of which there are no more than kMaxAwaited.
  static constexpr size_t kMaxAwaited = 128;
  void wait_any(std::span<const Awaited> awaited, const WaitPolicy& policy, WaitObserver& observer);

 private:
  static void wake_all(const Flag& flag);
  void sleep(std::span<const Awaited> awaited);
  // The sleep flag is 1 while any thread of this rank sleeps.
  void change_num_sleepers(int change);

  Flag* own_sleeping_;
  std::vector<const Flag*> peers_sleeping_;
  std::mutex mutex_;
  int num_sleepers_ = 0;  // guarded by mutex_, as the writing of the sleep flag
};

}  // namespace rota
