// Python's state of a thread. Up to 3.11.9, CPython deadlocks in a forked child if another thread
// was making or deleting its state when the child was forked (python/cpython issue 112275). A
// thread without a state makes and deletes one each time it takes the GIL, so also when it drops
// the last reference to a tensor that Python knows.
#pragma once

#include <Python.h>

namespace rota::tensors {

// The calling thread's state, made and deleted while nobody calls os.fork(), and in between used by
// whatever takes the GIL in this thread. Construct and destroy it in one thread, without the GIL.
class ThreadState {
 public:
  ThreadState();
  ~ThreadState();
  ThreadState(const ThreadState&) = delete;
  ThreadState& operator=(const ThreadState&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// Gives every progress thread a state for its whole life. Call it once, with the GIL held.
void keep_thread_states();

}  // namespace rota::tensors
