#include "cuda/device_info.h"

#include <cuda_runtime_api.h>

#include "transport/cuda_error.h"

namespace rota::cuda {
namespace {

using transport::check_cuda;

// What setup.py compiles for, ascending: 80 is compute capability 8.0.
constexpr int kArchs[] = {ROTA_CUDA_ARCHS};

}  // namespace

std::vector<std::string> archs() {
  std::vector<std::string> names;
  for (const int arch : kArchs) names.push_back(join("sm_", arch));
  names.push_back(join("compute_", kArchs[0]));
  return names;
}

std::vector<std::string> devices() {
  int driver_version = 0;
  check_cuda(cudaDriverGetVersion(&driver_version), "cudaDriverGetVersion");
  // cudaGetDeviceCount would say that its version is insufficient.
  if (driver_version == 0) throw Error(ErrorKind::kTransport, "no NVIDIA driver is installed");
  int num_devices = 0;
  check_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  std::vector<std::string> names;
  for (int device = 0; device < num_devices; ++device) {
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    names.push_back(join(properties.name, " (sm_", properties.major, properties.minor, ")"));
  }
  return names;
}

}  // namespace rota::cuda
