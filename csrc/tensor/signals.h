// Lets Ctrl-C interrupt a wait.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace rota::tensors {

// Runs Python's handlers of pending signals and throws what they raise. Does nothing outside
// Python's main thread. For callers that do not hold the GIL.
inline void check_python_signals() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace rota::tensors
