// Releases Python's global interpreter lock. A thread that waits for a progress thread, a GPU or a
// peer must not hold it, because a Python callback may have to run first. Nor may a thread that
// waits for a mutex: whoever holds that may want the lock, if only to drop a tensor.
#pragma once

#include <Python.h>

#include <mutex>

namespace rota::tensors {

// Works whether or not the thread holds the GIL.
class GilReleased {
 public:
  GilReleased()
      : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~GilReleased() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// How tensor/, c10d/ and the bindings lock, with or without the GIL.
template <typename Mutex>
class GilFreeLock {
 public:
  explicit GilFreeLock(Mutex& mutex) : lock_(mutex, std::try_to_lock) {
    if (lock_.owns_lock()) return;
    // It takes the GIL again with the mutex locked, for which nobody waits with the GIL.
    const GilReleased gil_released;
    lock_.lock();
  }

 private:
  std::unique_lock<Mutex> lock_;
};

// For Python objects whose destructors wait; Python destroys them with the GIL held.
struct DeleteWithoutGil {
  template <typename T>
  void operator()(T* object) const {
    const GilReleased gil_released;
    delete object;
  }
};

}  // namespace rota::tensors
