// Classes that only CUDA builds have.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace rota::tensors {

// LocalGroup, GradientBucket and the memory of windows; python/rota/_C/__init__.pyi documents them.
void add_gpu_classes(pybind11::module_& module);

}  // namespace rota::tensors
