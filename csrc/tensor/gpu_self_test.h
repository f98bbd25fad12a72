// The self-test of a GPU, for `python -m rota doctor`. CPU builds use without_cuda.cpp instead.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace rota::tensors {

struct KernelReport {
  std::string kernel;  // "two_shot", "pack"
  size_t num_formats;  // tested; for pack and unpack, pairs of gradient dtype and wire format
  std::vector<std::string> findings;
  double milliseconds;  // launches, copies and comparisons, all formats together
};

// Tests the GPU with this index even if there is a record, and replaces the record. Blocks. Throws
// Error(kTransport) with the CUDA runtime's error, or naming a kernel that did not finish.
std::vector<KernelReport> run_gpu_self_test(int device);

// The failures recorded for this GPU, driver and build; nullopt without a record. Throws
// Error(kTransport). Creates no CUDA context.
std::optional<std::vector<std::string>> recorded_gpu_self_test(int device);

}  // namespace rota::tensors
