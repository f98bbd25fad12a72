// A communicator's queue of asynchronous work. Runs tasks in order on a thread that it borrows from
// the process's pool while there are any.
//
// A task may end in code that is not ours, such as a future's callbacks, which may wait for a later
// task. So its thread leaves the queue first, and another one goes on with it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace rota {

class ProgressThread;

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
  // As close(), but never waits for tasks that have left: they do not refer to the queue.
  ~ProgressQueue() { end(/*awaits_left=*/false); }
  ProgressQueue(const ProgressQueue&) = delete;
  ProgressQueue& operator=(const ProgressQueue&) = delete;

  // Borrows a thread if the queue has none. Tasks must not throw. Throws Error(kInternal) once
  // closed, and Error(kTransport) if no thread can be had; the task is left to the caller then.
  void enqueue(std::function<void()>&& task);

  // Waits until all queued tasks have ended and their threads are returned. Idempotent. In a forked
  // child, which lacks the threads, it only drops the tasks. Called from a task of this queue, it
  // returns at once and the thread runs the remaining tasks. Called from any other task, or inside
  // a call (core/call_scope.h), it does not wait for tasks that have left this queue: they may wait
  // for its caller.
  void close() { end(/*awaits_left=*/true); }

  // Called by a task: the rest of it, and the release of what it holds, is no longer part of its
  // queue, which goes on without waiting for it. If no thread can be had, it stays. Does nothing in
  // other threads, and the second time.
  static void leave();

  // True when no task is queued or in its turn, so that the caller may run its work itself.
  bool is_idle() const;

 private:
  // Shared with the threads, because a task may destroy the queue.
  struct State;
  struct Turn;
  void end(bool awaits_left);
  static void start(std::shared_ptr<State> state, ProgressThread& thread);
  static void run(Turn& turn);

  std::shared_ptr<State> state_;
  uint64_t fork_generation_;
};

}  // namespace rota
