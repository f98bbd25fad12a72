// The threads on which groups make progress: a group borrows one while it has work queued. There
// are as many as there were groups with queued work at one time. Fewer would not do: executors
// block, so two groups on one thread would wait for each other where ranks use them in different
// orders.
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
  ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // These are for who has borrowed it.
  // Once; the job gives the thread back.
  void start(std::function<void()> job);
  // Where it runs: on the core of the caller, or wherever the caller may. Only hints: where they
  // fail, the thread stays where it is.
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

// One for each process (base/per_process.h). Its threads wait for the next group until the process
// ends; they hold nothing of the last one.
class ProgressPool {
 public:
  // The one that was given back last, which is the likeliest to be in a core's caches; a new one
  // where all are borrowed. Throws Error(kTransport) where no thread can be started.
  ProgressThread& borrow();
  // By the thread itself, in its job. It may be borrowed again, and started, before that job has
  // returned: it goes on with the next one then. So a group that queues work right behind its last
  // gets the same thread again, and not one more.
  void give_back(ProgressThread& thread);

 private:
  ProgressThread& start_thread();

  std::mutex mutex_;
  std::vector<std::unique_ptr<ProgressThread>> threads_;
  std::vector<ProgressThread*> idle_;
};

}  // namespace rota
