// A communicator's one progress thread: runs what is queued, first in, first out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

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

  // Starts the thread at the first call. Tasks must not throw. Throws Error(kInternal) once closed.
  void enqueue(std::function<void()> task);

  // Runs what is still queued, then ends the thread. Idempotent. In a forked child, where there is
  // no such thread, it only forgets. Called by a task, it returns at once, and the thread ends by
  // itself.
  void close();

  // True when nothing is queued or running: the caller may then do its work itself, in order. So
  // may a task, which would wait for itself otherwise.
  bool is_idle() const;

 private:
  // Shared with the thread, which may outlive the queue when a task destroys it.
  struct State;
  static void run(const std::shared_ptr<State>& state);
  void move_to_core_of_caller();

  Placement placement_;
  int core_ = -1;  // that the thread is bound to; guarded by the state's mutex
  std::shared_ptr<State> state_;
  std::thread thread_;  // guarded by the state's mutex
  uint64_t fork_generation_;
};

}  // namespace rota
