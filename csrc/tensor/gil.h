// Releases Python's global interpreter lock. A thread that waits for a progress thread, a GPU or a
// peer must not hold it, because a Python callback may have to run first.
#pragma once

#include <Python.h>

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

// For Python objects whose destructors wait; Python destroys them with the GIL held.
struct DeleteWithoutGil {
  template <typename T>
  void operator()(T* object) const {
    const GilReleased gil_released;
    delete object;
  }
};

}  // namespace rota::tensors
