// Communicator.all_reduce for Python, bound by hand: of a small message the binding is a third of
// the time. pybind11 takes 0.5 us more for one keyword, torch's PythonArgParser 0.1 us.
#pragma once

#include <Python.h>

namespace rota::tensors {

// Gives `type`, pybind11's class of TensorCommunicator, the method all_reduce.
void add_all_reduce_method(PyTypeObject* type);

}  // namespace rota::tensors
