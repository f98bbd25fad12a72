// A communicator's one progress thread: runs what is queued, first in, first out.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace rota {

class ProgressQueue {
 public:
  ProgressQueue();
  ~ProgressQueue() { close(); }
  ProgressQueue(const ProgressQueue&) = delete;
  ProgressQueue& operator=(const ProgressQueue&) = delete;

  // Starts the thread at the first call. Tasks must not throw.
  void enqueue(std::function<void()> task);

  // Runs what is still queued, then ends the thread. In a forked child, where there is no such
  // thread, it only forgets. Idempotent; nothing may be enqueued afterwards.
  void close();

  // True when nothing is queued or running: the caller may then do its work itself, in order.
  bool is_idle() const { return num_pending_.load(std::memory_order_acquire) == 0; }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable has_work_;
  std::deque<std::function<void()>> tasks_;
  std::atomic<int64_t> num_pending_{0};
  bool is_closing_ = false;
  std::thread thread_;
  uint64_t fork_generation_;
};

}  // namespace rota
