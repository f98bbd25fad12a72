// Ctrl-C in the middle of a wait.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace rota::tensors {

// Runs Python's handlers of signals that have come, and throws what they raise; in any other thread
// than Python's main one there are none. For callers that do not hold Python's lock.
inline void check_python_signals() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace rota::tensors
