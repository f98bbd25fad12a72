// Progress threads, which groups borrow while they have work queued. The pool grows to the largest
// number of groups that were busy at one time. Groups cannot share a thread: executors block, so
// two groups on one thread would deadlock if ranks used them in different orders.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace rota {

class ProgressThread {
 public:
  ProgressThread() : thread_([this] { run(); }) {}

  // What every thread made from now on runs before its first job.
  static void run_first(void (*function)());

  // For the borrower only.
  // Call once per loan; the job returns the thread to the pool.
  void start(std::function<void()> job);
  // Pin the thread to the caller's core, or let it run on all of the caller's cores. Failures are
  // ignored.
  void bind_to_core_of_caller();
  void unbind();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable has_job_;
  std::function<void()> job_;  // guarded by the mutex
  int core_ = -1;              // that it is bound to; its borrower's
  std::thread thread_;
};

// One per process (base/per_process.h). Idle threads live until the process ends and hold no
// group's state.
class ProgressPool {
 public:
  // Returns the most recently used idle thread, whose caches are warmest, or starts a new one.
  // Throws Error(kTransport) if no thread can be started.
  ProgressThread& borrow();
  // Called by the thread itself, in its job. The thread may be borrowed and started again before
  // that job returns, so a group that queues more work right away gets the same thread.
  void give_back(ProgressThread& thread);
  // Blocks until no thread is borrowed.
  void await_all();

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<ProgressThread>> threads_;
  std::vector<ProgressThread*> idle_;
  std::condition_variable has_given_back_;
};

}  // namespace rota
