// The few kernels of torch that stand in here for their like.
#pragma once

#include <string_view>

#include "completion.h"

namespace simulated_gpu {

// No task where the kernel is none of them. name: demangled.
Task prepare_torch_kernel(std::string_view name, void** args);

}  // namespace simulated_gpu
