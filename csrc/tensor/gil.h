// Python's interpreter lock: whoever waits for a progress thread, a GPU or a peer must not hold it,
// since what it waits for may have a callback in Python to run first.
#pragma once

#include <Python.h>

namespace rota::tensors {

// For threads that may hold it or not.
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

// For objects of Python whose destructors wait; Python drops them with the lock held.
struct DeleteWithoutGil {
  template <typename T>
  void operator()(T* object) const {
    const GilReleased gil_released;
    delete object;
  }
};

}  // namespace rota::tensors
