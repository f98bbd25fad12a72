// The self-test of a GPU, for `python -m rota doctor`. A build for the CPU has without_cuda.cpp for
// it.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace rota::tensors {

struct KernelReport {
  std::string kernel;  // "two_shot", "pack"
  size_t num_formats;  // tested; of pack and unpack: pairs of gradients' dtype and wire format
  std::vector<std::string> findings;
  double milliseconds;  // launches, copies and comparisons, all formats together
};

// Runs it on the GPU of this index whatever is known already, and renews the record. Blocks. Throws
// Error(kTransport): what the CUDA runtime says, or which kernel has not come to an end.
std::vector<KernelReport> run_gpu_self_test(int device);

// What the record of this GPU, driver and build says has failed; none: there is none. Throws
// Error(kTransport). Makes no CUDA context.
std::optional<std::vector<std::string>> recorded_gpu_self_test(int device);

}  // namespace rota::tensors
