// Functions of the CUDA driver that are not simulated: each says so when it is called.
#pragma once

#include <string>

namespace simulated_gpu {

// What takes any arguments and fails, naming this function.
void* unsupported_function(const std::string& name);

}  // namespace simulated_gpu
