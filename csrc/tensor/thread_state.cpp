#include "tensor/thread_state.h"

#include <torch/csrc/utils/pybind.h>

#include <mutex>

#include "base/per_process.h"
#include "core/progress_pool.h"

namespace rota::tensors {
namespace {

namespace py = pybind11;

// Held while a thread makes or deletes its state, and by a thread in os.fork(). The child has its
// own, which is free.
std::mutex& changing_states() { return per_process<std::mutex>(); }

void lock_for_fork() {
  const py::gil_scoped_release gil_released;  // whoever holds the lock takes the GIL
  changing_states().lock();
}

void unlock_after_fork() { changing_states().unlock(); }

// Whatever takes the GIL in this thread uses it meanwhile.
class ThreadState {
 public:
  ThreadState() {
    const std::lock_guard lock(changing_states());
    if (!Py_IsInitialized()) return;
    PyGILState_Ensure();
    state_ = PyEval_SaveThread();
  }
  ~ThreadState() {
    const std::lock_guard lock(changing_states());
    if (state_ == nullptr || !Py_IsInitialized()) return;
    PyEval_RestoreThread(state_);
    PyGILState_Release(PyGILState_UNLOCKED);
  }
  ThreadState(const ThreadState&) = delete;
  ThreadState& operator=(const ThreadState&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace

void keep_thread_state() { thread_local const ThreadState state; }

void keep_progress_thread_states() {
  ProgressThread::run_first(&keep_thread_state);
  py::module_::import("os").attr("register_at_fork")(
      py::arg("before") = py::cpp_function(&lock_for_fork),
      py::arg("after_in_parent") = py::cpp_function(&unlock_after_fork));
}

}  // namespace rota::tensors
