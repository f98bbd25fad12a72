#include "transport/gpu_identity.h"

#include <cstring>

#include "transport/cuda_error.h"

namespace rota::transport {

int current_gpu() {
  int gpu = 0;
  check_cuda(cudaGetDevice(&gpu), "cudaGetDevice");
  return gpu;
}

GpuIdentity identity_of_gpu(int gpu) {
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, gpu), "cudaGetDeviceProperties");
  GpuIdentity identity{};
  static_assert(sizeof(identity.uuid) == sizeof(properties.uuid.bytes) &&
                sizeof(identity.name) == sizeof(properties.name));
  std::memcpy(identity.uuid, properties.uuid.bytes, sizeof(identity.uuid));
  std::memcpy(identity.name, properties.name, sizeof(identity.name) - 1);
  return identity;
}

std::optional<int> find_gpu(const GpuIdentity& identity) {
  int num_gpus = 0;
  check_cuda(cudaGetDeviceCount(&num_gpus), "cudaGetDeviceCount");
  for (int gpu = 0; gpu < num_gpus; ++gpu) {
    const GpuIdentity own = identity_of_gpu(gpu);
    if (std::memcmp(own.uuid, identity.uuid, sizeof(own.uuid)) == 0) return gpu;
  }
  return std::nullopt;
}

// Atomic operations of the GPU's own go over NVLink, and not over PCIe.
bool is_joined_by_nvlink(const GpuIdentity& peer) {
  const int own = current_gpu();
  const std::optional<int> other = find_gpu(peer);
  if (!other || *other == own) return false;
  int has_atomics = 0;
  check_cuda(
      cudaDeviceGetP2PAttribute(&has_atomics, cudaDevP2PAttrNativeAtomicSupported, own, *other),
      "cudaDeviceGetP2PAttribute");
  return has_atomics != 0;
}

}  // namespace rota::transport
