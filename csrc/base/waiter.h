// The only way to wait on the CPU: a short spin, then yield, then futex. Through its WaitObserver
// every wait polls for an abort, has a deadline and lets signals through.
//
// How a sleeper is woken: a waiting rank sets `sleeping` in its own region, checks the flag again
// and only then sleeps on it; a publisher stores the flag and then checks `sleeping` of every peer.
// All four accesses are sequentially consistent, so at least one side sees the other. A sleep lasts
// at most kTick and the observer runs between sleeps, so a lost wake-up could cost one tick but
// never a hang.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/core_sharing.h"
#include "base/error.h"
#include "base/flag.h"
#include "base/life_word.h"

namespace rota {

using Nanoseconds = std::chrono::nanoseconds;

inline constexpr Nanoseconds kTick = std::chrono::milliseconds(1);
static_assert(kTick < std::chrono::seconds(1), "a timespec's nanoseconds");

// Checks for whatever else must end a wait.
class WaitObserver {
 public:
  virtual ~WaitObserver() = default;

  // Called often while spinning, so it must not make a system call. An error ends the wait.
  virtual std::optional<Error> poll() = 0;

  // Called about once per kTick of sleep. May throw to interrupt the wait (a Python signal).
  virtual std::optional<Error> tick(Nanoseconds waited) = 0;

  // The lives of the processes that are waited for; null: not known. Once one begins to end, tick()
  // is called at once.
  virtual std::vector<const LifeWord*> lives() const { return {}; }
};

// Is told which peer each wait is for, so that errors can name it.
class PeerWaitObserver : public WaitObserver {
 public:
  virtual void begin_wait(int peer, std::string_view phase, uint64_t step) = 0;
};

struct WaitPolicy {
  Nanoseconds spin{0};        // busy wait; nothing else runs on this core meanwhile
  Nanoseconds yield_for{0};   // sched_yield in a loop
  bool shares_cores = false;  // ranks outnumber the cores, see base/core_sharing.h

  // Ranks spin only if each has a core.
  static WaitPolicy for_ranks(int num_ranks);
};

// A flag, and the value that ends a wait for it.
struct Awaited {
  const Flag* flag;
  uint64_t target;

  bool is_there() const { return flag->load() >= target; }
};

// One per rank; its threads may share it.
class Waiter {
 public:
  // own_sleeping: this rank's sleep flag, which peers read. peers_sleeping: the peers' sleep flags,
  // which publish() reads. core_sharing: of this rank, or null; must outlive the waiter.
  Waiter(Flag* own_sleeping, std::vector<const Flag*> peers_sleeping,
         CoreSharing* core_sharing = nullptr);

  // Publishes `value`: whoever sees it also sees everything written before. Wakes sleepers.
  void publish(Flag& flag, uint64_t value) {
    flag.publish(value);
    for (const Flag* sleeping : peers_sleeping_) {
      if (sleeping->load_ordered() != 0) return wake_all(flag);
    }
  }

  static void wake_all(const Flag& flag);

  // Returns when flag >= target; throws the observer's error if the flag has not arrived.
  void wait(const Flag& flag, uint64_t target, const WaitPolicy& policy, WaitObserver& observer) {
    const Awaited awaited{&flag, target};
    if (!awaited.is_there()) wait_any({&awaited, 1}, policy, observer);
  }

  // Returns true when at least one of at most kMaxAwaited flags has arrived; false if none has
  // after `patience`, which is looked at once per sleep.
  static constexpr size_t kMaxAwaited = 128;
  bool wait_any(std::span<const Awaited> awaited, const WaitPolicy& policy, WaitObserver& observer,
                std::optional<Nanoseconds> patience = std::nullopt);

 private:
  // Until a flag changes or the process of a life begins to end, and at most for a tick.
  void sleep(std::span<const Awaited> awaited, const std::vector<const LifeWord*>& lives);
  // The sleep flag is 1 while any thread of this rank sleeps.
  void change_num_sleepers(int change);

  Flag* own_sleeping_;
  std::vector<const Flag*> peers_sleeping_;
  CoreSharing* core_sharing_;
  std::mutex mutex_;
  int num_sleepers_ = 0;  // guarded by mutex_, as are writes of the sleep flag
};

}  // namespace rota
