// What one thread waits for and another has done.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace simulated_gpu {

class Completion {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void finish() {
    const std::lock_guard guard(mutex_);
    when_ = std::chrono::steady_clock::now();
    is_done_ = true;
    changed_.notify_all();
  }
  bool is_done() const {
    const std::lock_guard guard(mutex_);
    return is_done_;
  }
  void wait() const {
    std::unique_lock guard(mutex_);
    changed_.wait(guard, [&] { return is_done_; });
  }
  Time when() const {
    const std::lock_guard guard(mutex_);
    return when_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool is_done_ = false;
  Time when_;
};

using CompletionPtr = std::shared_ptr<Completion>;

inline void wait_for_all(const std::vector<CompletionPtr>& completions) {
  for (const CompletionPtr& completion : completions) completion->wait();
}

// What a stream's worker runs.
using Task = std::function<void()>;

}  // namespace simulated_gpu
