// What one thread waits for and another has done.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <vector>

namespace simulated_gpu {

// Finished once.
class Completion {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void finish() { done_.set_value(std::chrono::steady_clock::now()); }
  bool is_done() const {
    return when_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  void wait() const { when_.wait(); }
  Time when() const { return when_.get(); }

 private:
  std::promise<Time> done_;
  const std::shared_future<Time> when_ = done_.get_future().share();
};

using CompletionPtr = std::shared_ptr<Completion>;

// Null where there is nothing to wait for.
inline void wait_for(const CompletionPtr& completion) {
  if (completion != nullptr) completion->wait();
}
inline void wait_for_all(const std::vector<CompletionPtr>& completions) {
  for (const CompletionPtr& completion : completions) wait_for(completion);
}

// What a stream's worker runs.
using Task = std::function<void()>;

}  // namespace simulated_gpu
