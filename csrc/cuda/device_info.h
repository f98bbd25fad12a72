// The architectures that this build's CUDA kernels were compiled for, and the GPUs of this machine.
// CPU-only builds compile without_cuda.cpp in place of the .cu files. Knows nothing of collectives.
#pragma once

#include <string>
#include <vector>

namespace rota::cuda {

// Architectures with machine code in this build ("sm_80") and, last, the one whose PTX a driver
// compiles for newer GPUs ("compute_100"). Empty in a CPU-only build.
std::vector<std::string> archs();

// Names of the GPUs that the CUDA runtime sees ("NVIDIA H200 (sm_90)"), in its order. Throws
// Error(kTransport) with the runtime's reason if there is none. Makes no CUDA context.
std::vector<std::string> devices();

// Identifies a GPU, and the driver that compiles and runs its kernels.
struct GpuInfo {
  std::string name;    // "NVIDIA H200"
  std::string uuid;    // hexadecimal
  std::string driver;  // "580.65.06 (CUDA 13.0)"; where only CUDA's version is known: "CUDA 13.0"
};

// Throws Error(kTransport). Makes no CUDA context.
GpuInfo gpu_info(int device);

}  // namespace rota::cuda
