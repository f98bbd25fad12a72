// The class Communicator for Python, with all of its methods; python/rota/_C/__init__.pyi documents
// them. pybind11 binds most. Those that short messages go through are bound by hand, because the
// binding takes a third of their time: pybind11 takes 0.5 us more for one keyword, torch's
// PythonArgParser 0.1 us.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace rota::tensors {

void bind_communicator(pybind11::module_& module);

}  // namespace rota::tensors
