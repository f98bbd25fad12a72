// Communicator.all_reduce for Python, bound by hand because the binding takes a third of the time
// of a small message. pybind11 takes 0.5 us more for one keyword, torch's PythonArgParser 0.1 us.
#pragma once

#include <Python.h>

namespace rota::tensors {

// Adds the method all_reduce to `type`, pybind11's class for TensorCommunicator.
void add_all_reduce_method(PyTypeObject* type);

}  // namespace rota::tensors
