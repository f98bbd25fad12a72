#include "devices.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <vector>

#include "libraries.h"
#include "memory.h"
#include "result.h"
#include "settings.h"
#include "streams.h"

namespace simulated_gpu {
namespace {

// As an H100, in what torch and rota ask for.
constexpr int kMajor = 9;
constexpr int kMinor = 0;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kThreadsPerBlock = 1024;
constexpr int kRegistersPerMultiprocessor = 65536;
constexpr int kSharedBytesPerBlock = 48 * 1024;
constexpr int kSharedBytesPerBlockOptin = 227 * 1024;
constexpr int kSharedBytesPerMultiprocessor = 228 * 1024;
constexpr int kWarpSize = 32;
constexpr int kL2Bytes = 50 * 1024 * 1024;
constexpr int kClockKhz = 1'980'000;
constexpr int kMemoryClockKhz = 2'619'000;
constexpr int kMemoryBusBits = 5120;
constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

thread_local int device_of_thread = 0;

std::vector<int> read_visible_devices() {
  std::vector<int> devices;
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) {
    for (int device = 0; device < settings().num_devices; ++device) devices.push_back(device);
    return devices;
  }
  // The first entry that is none ends the list.
  for (char* end = nullptr; *text != '\0'; text = *end == ',' ? end + 1 : end) {
    const long device = std::strtol(text, &end, 10);
    if (end == text || device < 0 || device >= settings().num_devices) break;
    devices.push_back(static_cast<int>(device));
  }
  return devices;
}

const std::vector<int>& visible_devices() {
  static const auto* devices = new std::vector<int>(read_visible_devices());
  return *devices;
}

int pci_bus(int device) { return physical_device(device) + 1; }

void fill(cudaDeviceProp& properties, int device) {
  std::memset(&properties, 0, sizeof(properties));
  std::snprintf(properties.name, sizeof(properties.name), "simulated GPU");
  std::snprintf(properties.uuid.bytes, sizeof(properties.uuid.bytes), "simulated %d",
                physical_device(device));
  properties.totalGlobalMem = memory().total_bytes();
  properties.sharedMemPerBlock = kSharedBytesPerBlock;
  properties.sharedMemPerBlockOptin = kSharedBytesPerBlockOptin;
  properties.sharedMemPerMultiprocessor = kSharedBytesPerMultiprocessor;
  properties.regsPerBlock = kRegistersPerMultiprocessor;
  properties.regsPerMultiprocessor = kRegistersPerMultiprocessor;
  properties.warpSize = kWarpSize;
  properties.maxThreadsPerBlock = kThreadsPerBlock;
  properties.maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  properties.maxBlocksPerMultiProcessor = kThreadsPerMultiprocessor / 64;
  for (int axis = 0; axis < 3; ++axis) {
    properties.maxThreadsDim[axis] = axis == 2 ? 64 : kThreadsPerBlock;
    properties.maxGridSize[axis] = axis == 0 ? 0x7fffffff : 0xffff;
  }
  properties.major = kMajor;
  properties.minor = kMinor;
  properties.multiProcessorCount = settings().num_multiprocessors;
  properties.l2CacheSize = kL2Bytes;
  properties.persistingL2CacheMaxSize = kL2Bytes / 2;
  properties.memoryBusWidth = kMemoryBusBits;
  properties.pciBusID = pci_bus(device);
  properties.unifiedAddressing = 1;
  properties.canMapHostMemory = 1;
  properties.concurrentKernels = 1;
  properties.asyncEngineCount = 3;
  properties.cooperativeLaunch = settings().has_cooperative_launch;
  properties.hostNativeAtomicSupported = 0;
  properties.globalL1CacheSupported = 1;
  properties.localL1CacheSupported = 1;
  properties.streamPrioritiesSupported = 1;
  properties.computePreemptionSupported = 1;
  properties.canUseHostPointerForRegisteredMem = 1;
  properties.textureAlignment = 512;
  properties.memPitch = 0x7fffffff;
}

int attribute(cudaDeviceAttr which, int device) {
  cudaDeviceProp properties;
  fill(properties, device);
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
      return kThreadsPerBlock;
    case cudaDevAttrMaxBlockDimX:
      return properties.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimY:
      return properties.maxThreadsDim[1];
    case cudaDevAttrMaxBlockDimZ:
      return properties.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX:
      return properties.maxGridSize[0];
    case cudaDevAttrMaxGridDimY:
      return properties.maxGridSize[1];
    case cudaDevAttrMaxGridDimZ:
      return properties.maxGridSize[2];
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return kSharedBytesPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return kSharedBytesPerBlockOptin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return kSharedBytesPerMultiprocessor;
    case cudaDevAttrMaxRegistersPerBlock:
      return kRegistersPerMultiprocessor;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return kRegistersPerMultiprocessor;
    case cudaDevAttrWarpSize:
      return kWarpSize;
    case cudaDevAttrMultiProcessorCount:
      return properties.multiProcessorCount;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return kThreadsPerMultiprocessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return properties.maxBlocksPerMultiProcessor;
    case cudaDevAttrComputeCapabilityMajor:
      return kMajor;
    case cudaDevAttrComputeCapabilityMinor:
      return kMinor;
    case cudaDevAttrClockRate:
      return kClockKhz;
    case cudaDevAttrMemoryClockRate:
      return kMemoryClockKhz;
    case cudaDevAttrGlobalMemoryBusWidth:
      return kMemoryBusBits;
    case cudaDevAttrL2CacheSize:
      return kL2Bytes;
    case cudaDevAttrPciBusId:
      return pci_bus(device);
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrComputePreemptionSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrGpuOverlap:
      return 1;
    case cudaDevAttrCooperativeLaunch:
      return properties.cooperativeLaunch;
    case cudaDevAttrAsyncEngineCount:
      return properties.asyncEngineCount;
    // No managed memory, no pools, no virtual memory management, no host atomics.
    default:
      return 0;
  }
}

// When torch begins to use the devices, once its own libraries have registered what they have.
void load_parts_of_torch() {
  static std::once_flag first;
  if (dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD) == nullptr) return;
  std::call_once(first, [] {
    if (settings().has_torch_operators) load_beside(kOperatorsLibrary);
    if (settings().has_symmetric_memory) load_beside(kSymmetricMemoryLibrary);
  });
}

}  // namespace

int num_devices() { return static_cast<int>(visible_devices().size()); }

int current_device() { return device_of_thread; }

int physical_device(int device) { return visible_devices()[static_cast<size_t>(device)]; }

int visible_device(int physical) {
  const auto& devices = visible_devices();
  const auto place = std::find(devices.begin(), devices.end(), physical);
  return place == devices.end() ? -1 : static_cast<int>(place - devices.begin());
}

void check_device(int device) {
  require(num_devices() > 0, cudaErrorNoDevice);
  require(device >= 0 && device < num_devices(), cudaErrorInvalidDevice);
}

}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaDriverGetVersion(int* version) {
  *version = settings().driver_version;
  return cudaSuccess;
}

extern "C" cudaError_t cudaGetDeviceCount(int* count) {
  return call([&] {
    require(settings().driver_version / 1000 >= CUDART_VERSION / 1000, cudaErrorInsufficientDriver);
    *count = num_devices();
    require(*count > 0, cudaErrorNoDevice);
  });
}

extern "C" cudaError_t cudaGetDevice(int* device) {
  return call([&] {
    check_device(current_device());
    *device = current_device();
  });
}

extern "C" cudaError_t cudaSetDevice(int device) {
  return call([&] {
    check_device(device);
    device_of_thread = device;
  });
}

extern "C" cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call([&] {
    check_device(device);
    load_parts_of_torch();
    fill(*properties, device);
  });
}

extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  return call([&] {
    check_device(device);
    *value = attribute(which, device);
  });
}

extern "C" cudaError_t cudaDeviceGetPCIBusId(char* text, int num_bytes, int device) {
  return call([&] {
    check_device(device);
    std::snprintf(text, static_cast<size_t>(num_bytes), "0000:%02x:00.0", pci_bus(device));
  });
}

extern "C" cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call([&] {
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
  });
}

extern "C" cudaError_t cudaDeviceCanAccessPeer(int* can_access, int device, int peer) {
  return call([&] {
    check_device(device);
    check_device(peer);
    *can_access = device != peer;
  });
}

extern "C" cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return call([&] {
    check_device(peer);
    require(peer != current_device(), cudaErrorInvalidDevice);
    static bool is_enabled[64][64];  // guarded by nothing: torch enables each once
    bool& enabled = is_enabled[current_device()][peer];
    require(!enabled, cudaErrorPeerAccessAlreadyEnabled);
    enabled = true;
  });
}

extern "C" cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr which, int device,
                                                 int peer) {
  return call([&] {
    check_device(device);
    check_device(peer);
    *value = which == cudaDevP2PAttrPerformanceRank ? 0 : 1;
  });
}

extern "C" cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return call([&] {
    check_device(current_device());
    *total = memory().total_bytes();
    *free = *total - memory().used_bytes(current_device());
  });
}

extern "C" cudaError_t cudaProfilerStart() { return cudaSuccess; }
extern "C" cudaError_t cudaProfilerStop() { return cudaSuccess; }
