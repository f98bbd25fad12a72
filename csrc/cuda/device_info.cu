#include "cuda/device_info.h"

#include <cuda_runtime_api.h>

#include <fstream>
#include <iomanip>
#include <iterator>

#include "transport/cuda_error.h"
#include "transport/gpu_identity.h"

namespace rota::cuda {
namespace {

using transport::check_cuda;

// The architectures that setup.py compiles for, ascending; 80 is compute capability 8.0. Only the
// last has PTX.
constexpr int kArchs[] = {ROTA_CUDA_ARCHS};

int driver_version() {
  int version = 0;
  check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  // cudaGetDeviceCount would report an insufficient driver version instead.
  if (version == 0) throw Error(ErrorKind::kTransport, "no NVIDIA driver is installed");
  return version;
}

// Some containers hide the kernel module's version.
std::string driver_text() {
  const int version = driver_version();
  const std::string of_cuda = join("CUDA ", version / 1000, '.', version % 1000 / 10);
  std::ifstream file("/sys/module/nvidia/version");
  std::string of_module;
  return file >> of_module ? join(of_module, " (", of_cuda, ")") : of_cuda;
}

}  // namespace

std::vector<std::string> archs() {
  std::vector<std::string> names;
  for (const int arch : kArchs) names.push_back(join("sm_", arch));
  names.push_back(join("compute_", std::end(kArchs)[-1]));
  return names;
}

std::vector<std::string> devices() {
  driver_version();
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

GpuInfo gpu_info(int device) {
  const transport::GpuIdentity identity = transport::identity_of_gpu(device);
  auto uuid = in_classic_locale<std::ostringstream>();
  uuid << std::hex << std::setfill('0');
  for (const char byte : identity.uuid) {
    uuid << std::setw(2) << static_cast<int>(static_cast<unsigned char>(byte));
  }
  return {.name = identity.name, .uuid = uuid.str(), .driver = driver_text()};
}

}  // namespace rota::cuda
