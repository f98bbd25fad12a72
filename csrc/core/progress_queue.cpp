#include "core/progress_queue.h"

#include "base/fork_generation.h"

namespace rota {

ProgressQueue::ProgressQueue() : fork_generation_(fork_generation()) {}

void ProgressQueue::close() {
  if (!thread_.joinable()) return;
  if (fork_generation_ != fork_generation()) return thread_.detach();
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  has_work_.notify_one();
  thread_.join();
}

void ProgressQueue::enqueue(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    num_pending_.fetch_add(1, std::memory_order_relaxed);
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  has_work_.notify_one();
}

void ProgressQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    has_work_.wait(lock, [this] { return is_closing_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    {
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }  // what the task holds is released before it counts as done
    num_pending_.fetch_sub(1, std::memory_order_release);
    lock.lock();
  }
}

}  // namespace rota
