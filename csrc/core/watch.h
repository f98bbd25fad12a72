// What ends a rank's wait early: a peer's abort, death or departure, the deadline, or a signal.
// Also names the awaited rank on stderr after a second.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/waiter.h"
#include "transport/transport.h"

namespace rota {

inline constexpr Nanoseconds kStallAfter = std::chrono::seconds(1);
// Checking for signals takes the GIL, and a busy Python thread may make this one wait for it.
inline constexpr Nanoseconds kInterruptCheckEvery = std::chrono::milliseconds(50);

inline int64_t milliseconds(Nanoseconds duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
}

// In place of a peer: whichever comes first.
inline constexpr int kAnyRank = std::numeric_limits<int>::min();

// The calling thread's kind: Python delivers signals to user threads only.
enum class CallerThread { kUser, kProgress };

class Watch final : public PeerWaitObserver {
 public:
  // check_interrupt may throw (KeyboardInterrupt); it runs in the waiting thread, if that lets
  // signals through, and must outlive this.
  Watch(const transport::Transport& transport, Nanoseconds timeout,
        const std::function<void()>* check_interrupt);

  // A collective of this epoch: a peer that has done its part of it may have left the group, or
  // have ended without a word; no wait of the collective is in vain because of that.
  // lets_signals_through is false on progress threads, to which Python delivers no signals.
  // own_timeout: of each wait of this collective; none: the group's.
  void begin_collective(std::string_view collective, uint64_t epoch, bool lets_signals_through,
                        std::optional<Nanoseconds> own_timeout = std::nullopt);
  // Anything else. Nobody knows what it needs of whom, so each death ends its waits.
  void begin_call(std::string_view call, uint64_t number, bool lets_signals_through);
  void begin_wait(int peer, std::string_view phase, uint64_t step) override;
  // For several peers at once, as a bit mask of ranks: fails when any of them leaves. An empty mask
  // fails when all have left.
  void begin_wait_for_all(uint64_t peers, std::string_view phase, uint64_t step);
  std::optional<Error> poll() override;
  std::optional<Error> tick(Nanoseconds waited) override;
  std::vector<const LifeWord*> lives() const override;
  // A rank that died without leaving the group or doing its part, or why it failed before. Costs a
  // system call.
  std::optional<Error> find_death();

  // The group's.
  Nanoseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Nanoseconds timeout) { timeout_.store(timeout, std::memory_order_relaxed); }

  // "rota.all_reduce: rank 2/4", the start of every message of this collective.
  std::string prefix() const;
  // "(epoch 17, two_shot reduce, step 3)", this rank's position.
  std::string place() const;

 private:
  Error cause_of(const Error& loss);
  bool has_departed(int peer) const;
  // Its part of this collective.
  bool has_done_its_part(int peer) const;
  bool is_needed(int peer) const;
  std::optional<Error> find_departure();
  std::string awaited() const;
  void warn_about_stall(Nanoseconds waited);

  const transport::Transport& transport_;
  std::atomic<Nanoseconds> timeout_;  // any thread may set it
  const std::function<void()>* check_interrupt_;

  std::string_view call_;
  uint64_t epoch_ = 0;  // or what begin_call() was given
  bool is_collective_ = false;
  bool lets_signals_through_ = false;
  std::optional<Nanoseconds> own_timeout_;
  int peer_ = 0;         // whom errors name
  uint64_t needed_ = 0;  // bits of the ranks that must not leave; none: not all others may
  std::string_view phase_;
  uint64_t step_ = 0;
  Nanoseconds next_interrupt_check_{0};  // measured from the start of the wait
  bool has_warned_ = false;
};

}  // namespace rota
