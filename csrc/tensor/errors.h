// Raises rota's errors in Python as rota.PeerFailed and so on, even through torch's own C++ code
// (DDP's backward), which turns other C++ exceptions into a bare RuntimeError.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <exception>

#include "base/error.h"

namespace rota::tensors {

// Raised as the Python type for its kind; torch calls python_type() with the GIL held.
class PythonError final : public torch::PyTorchError {
 public:
  explicit PythonError(const Error& error) : kind_(error.kind()) { msg = error.what(); }
  PyObject* python_type() override;
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Runs body and converts rota::Error to PythonError.
template <typename Body>
auto with_python_errors(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throw PythonError(error);
  }
}

}  // namespace rota::tensors
