// What the two libraries tell each other: the one that stands in for the CUDA runtime, which every
// program loads, and the one with rota's kernels, which the first launch of one of them loads.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include <cxxabi.h>

#include "completion.h"
#include "residency.h"

namespace simulated_gpu {

// A kernel's or type's name as people write it.
inline std::string demangled(const char* mangled) {
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr), &std::free);
  return text == nullptr ? mangled : text.get();
}

struct Grid {
  int num_blocks;        // of each local rank
  int num_local_ranks;   // gridDim.y
  int num_threads;       // of each block, here
  Residency* residency;  // of the device
  int block_room;        // that a block takes of it
  bool is_cooperative;
  uint64_t seed;
  uint64_t max_nap_us;
};

struct KernelLaunch {
  const char* mangled;  // as nvcc registers it
  const char* name;     // the same for people
  void** args;
  Grid grid;
};

// Copies the arguments; the task runs the kernel. No task where there is no such kernel.
using PrepareKernel = void(const KernelLaunch& launch, Task* task);
inline constexpr const char* kPrepareKernel = "simulated_gpu_prepare_kernel";
// Whether there is one.
using HasKernel = bool(const char* mangled, const char* name);
inline constexpr const char* kHasKernel = "simulated_gpu_has_kernel";

}  // namespace simulated_gpu
