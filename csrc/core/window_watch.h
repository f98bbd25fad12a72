// What ends a wait on another process's window early: the process has ended or closed the window,
// the deadline, or a signal to this process. Also says on stderr after a second what is awaited.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/waiter.h"
#include "core/watch.h"
#include "transport/window_memory.h"

namespace rota {

class WindowWatch : public WaitObserver {
 public:
  // check_interrupt runs several times a second, and may throw. It must outlive this.
  WindowWatch(Nanoseconds timeout, const std::function<void()>& check_interrupt)
      : timeout_(timeout), check_interrupt_(check_interrupt) {}

  std::optional<Error> poll() final { return std::nullopt; }
  std::optional<Error> tick(Nanoseconds waited) final;

 protected:
  // Whether anyone can still end the wait.
  virtual bool is_anyone_left() const = 0;
  // For texts: "rota.Window.wait_signal: rank 1/4", and "rank 0 (pid 4711), its signal".
  virtual std::string prefix() const = 0;
  virtual std::string awaited() const = 0;
  // Why nobody is left.
  virtual std::string end_of_awaited() const {
    return "ended or closed; go on with the ranks that are left";
  }

 private:
  using Clock = std::chrono::steady_clock;

  const Nanoseconds timeout_;
  const std::function<void()>& check_interrupt_;
  // On the clock, since one call may wait many times for short.
  Clock::time_point next_interrupt_check_ = Clock::now() + kInterruptCheckEvery;
  bool has_warned_ = false;
};

// Whether the window's owner runs and has not closed it.
bool is_open(const transport::WindowControl& control, const transport::PeerProcess& process);

// Publishes a word of this process's window and wakes all who sleep on it: openers that may only
// read cannot publish that they sleep.
void publish_word(const transport::WindowView& view, uint64_t word, uint64_t value);

// Waits until the word is at least `value`; returns false after `timeout`. Throws
// Error(kPeerFailed) if the owner has ended or closed the window before. who: the owner, in errors.
bool wait_word(const transport::OpenedWindow& window, uint64_t word, uint64_t value,
               Nanoseconds timeout, const std::string& who,
               const std::function<void()>& check_interrupt);

}  // namespace rota
