// Which GPU a process works on, in words that hold in other processes, which may number GPUs
// otherwise, and by what it is joined to another one.
#pragma once

#include <optional>

namespace rota::transport {

// As cudaGetDeviceProperties gives it. Processes hand it to each other as it is.
struct GpuIdentity {
  char uuid[16];
  char name[256];  // ends with a 0
};

// Each throws Error(kTransport) for what the CUDA runtime says.
int current_gpu();
GpuIdentity identity_of_gpu(int gpu);
// The number of a GPU in this process; none: this process does not see it.
std::optional<int> find_gpu(const GpuIdentity& identity);
// Whether the current GPU reaches another one by NVLink. A GPU that this process does not see
// cannot be asked about, nor has a GPU a link to itself: false.
bool is_joined_by_nvlink(const GpuIdentity& peer);

}  // namespace rota::transport
