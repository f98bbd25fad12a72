// Those methods of Communicator for Python that short messages go through, bound by hand because
// the binding takes a third of their time. pybind11 takes 0.5 us more for one keyword, torch's
// PythonArgParser 0.1 us.
#pragma once

#include <Python.h>

namespace rota::tensors {

// Adds all_reduce, all_gather, reduce_scatter, broadcast, send and recv to `type`, pybind11's class
// for TensorCommunicator.
void add_fast_methods(PyTypeObject* type);

}  // namespace rota::tensors
