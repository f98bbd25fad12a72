// Carries rota's errors into Python as rota.PeerFailed and its kin, also through torch's own code
// (DDP's backward), which would turn any other C++ exception into a bare RuntimeError.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <exception>

#include "base/error.h"

namespace rota::tensors {

// Named as its Python type; torch asks python_type() with the GIL held.
class PythonError final : public torch::PyTorchError {
 public:
  explicit PythonError(const Error& error) : kind_(error.kind()) { msg = error.what(); }
  PyObject* python_type() override;

 private:
  ErrorKind kind_;
};

// Runs body; a rota::Error leaves as PythonError.
template <typename Body>
auto with_python_errors(Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error& error) {
    throw PythonError(error);
  }
}

}  // namespace rota::tensors
