// Ranks as threads of this process, over transport::ThreadTransport.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <string_view>
#include <thread>

#include "check.h"
#include "core/communicator.h"
#include "random.h"

namespace rota::test {

// So small that a few KiB already pass through many slots and all cells of a link.
inline constexpr transport::Geometry kSmall{
    .message_bytes = 1024, .slot_bytes = 4096, .num_cells = 8, .cell_bytes = 1024};

// Longer than any successful wait, even with a sanitizer on cores shared with other work.
inline constexpr std::chrono::seconds kPatience{60};

struct RanksOptions {
  transport::Geometry geometry = kSmall;
  Nanoseconds timeout = kPatience;
  std::function<void()> check_interrupt = [] {};
};

class FirstException {
 public:
  // In a handler.
  void keep() {
    const std::lock_guard lock(mutex_);
    if (!first_) first_ = std::current_exception();
  }
  // Once the threads have ended; does nothing if there was none.
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

// Blocks until it is true, which it must be soon.
template <typename Condition>
void await(const Condition& condition, std::string_view what) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    check(std::chrono::steady_clock::now() < deadline, what);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Mostly goes on at once; otherwise lets other threads run, or is clearly late.
void dawdle(Random& random);

// Runs body on every rank, each in its own thread with its own communicator, which closes as soon
// as that rank is done. A rank that throws aborts the group; the first such exception is rethrown
// here.
void run_ranks(int world_size, const std::function<void(Communicator&)>& body,
               const RanksOptions& options = {});

// Runs body in threads, for ranks that build what they need themselves; rethrows likewise.
void run_threads(int num_threads, const std::function<void(int)>& body);

}  // namespace rota::test
