// Python's states of rota's own threads. Up to 3.11.9, CPython deadlocks in a forked child if
// another thread was making or deleting its state when the child was forked (python/cpython issue
// 112275). A thread without a state makes and deletes one each time it takes the GIL, so also when
// it drops the last reference to a tensor that Python knows.
#pragma once

namespace rota::tensors {

// Gives the calling thread, which must not hold the GIL, a state until it ends. The state is made
// and deleted while nobody calls os.fork(), and outlives what the thread's function holds.
void keep_thread_state();

// Lets every progress thread do so. Call it once, with the GIL held.
void keep_progress_thread_states();

}  // namespace rota::tensors
