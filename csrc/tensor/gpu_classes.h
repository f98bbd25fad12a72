// Classes that only CUDA builds have.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace rota::tensors {

// LocalGroup and GradientBucket; python/rota/_C/__init__.pyi documents them.
void add_gpu_classes(pybind11::module_& module);

}  // namespace rota::tensors
