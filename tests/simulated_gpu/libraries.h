// The other libraries of the simulation, which lie beside this one and are loaded when they are
// needed.
#pragma once

namespace simulated_gpu {

inline constexpr const char* kKernelsLibrary = "librota_kernels.so";
inline constexpr const char* kOperatorsLibrary = "libtorch_operators.so";
inline constexpr const char* kSymmetricMemoryLibrary = "libtorch_symmetric_memory.so";

// Its handle; fails where it cannot be loaded.
void* load_beside(const char* file);

}  // namespace simulated_gpu
