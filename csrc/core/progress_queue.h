// A communicator's queue of asynchronous work. Runs tasks in order on a thread that it borrows from
// the process's pool while there are any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace rota {

class ProgressQueue {
 public:
  // Where the thread runs.
  enum class Placement {
    kAnyCore,
    // Where no core is to spare: on the core of the thread that queues work. The scheduler would
    // often put it on another rank's core and then move that rank about, which costs milliseconds.
    kCoreOfCaller,
  };

  explicit ProgressQueue(Placement placement = Placement::kAnyCore);
  ~ProgressQueue() { close(); }
  ProgressQueue(const ProgressQueue&) = delete;
  ProgressQueue& operator=(const ProgressQueue&) = delete;

  // Borrows a thread if the queue has none. Tasks must not throw. Throws Error(kInternal) once
  // closed.
  void enqueue(std::function<void()> task);

  // Waits until all queued tasks have run and the thread is returned. Idempotent. In a forked
  // child, which lacks the thread, it only drops the tasks. Called from a task of this queue, it
  // returns at once and the thread runs the remaining tasks.
  void close();

  // True when nothing is queued or running, so that the caller may run its work itself. Also true
  // for a running task, which would otherwise wait for itself.
  bool is_idle() const;

 private:
  // Shared with the thread, because a task may destroy the queue.
  struct State;
  static void run(State& state);

  Placement placement_;
  std::shared_ptr<State> state_;
  uint64_t fork_generation_;
};

}  // namespace rota
