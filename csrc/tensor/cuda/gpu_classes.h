// The classes of add_gpu_classes(), each bound where it is defined.
#pragma once

#include "tensor/gpus.h"

namespace rota::tensors {

namespace py = pybind11;

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using Tensors = std::vector<at::Tensor>;

void add_local_group(py::module_& module);
void add_gradient_bucket(py::module_& module);

}  // namespace rota::tensors
