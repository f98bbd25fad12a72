// A communicator's one progress thread: runs what is queued, first in, first out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace rota {

class ProgressQueue {
 public:
  ProgressQueue();
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

  std::shared_ptr<State> state_;
  std::thread thread_;  // guarded by the state's mutex
  uint64_t fork_generation_;
};

}  // namespace rota
