// What a communicator has queued: runs first in, first out, on a thread that it borrows from the
// process's pool while there is something.
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

  // Returns when all that is queued has run, and the thread is given back. Idempotent. In a forked
  // child, where there is no such thread, it only forgets. Called by a task of this queue, it
  // returns at once, and the thread runs what is left.
  void close();

  // True when nothing is queued or running: the caller may then do its work itself, in order. So
  // may a task, which would wait for itself otherwise.
  bool is_idle() const;

 private:
  // Shared with the thread, which may outlive the queue when a task destroys it.
  struct State;
  static void run(State& state);

  Placement placement_;
  std::shared_ptr<State> state_;
  uint64_t fork_generation_;
};

}  // namespace rota
