// The functions of the CUDA driver that torch calls by itself: it asks the runtime for some of them
// by name, and one of its libraries is linked to libcuda.so.1, whose name this library has. With
// contexts that are nothing but the number of a device.
#include <cuda.h>

#include <dlfcn.h>

#include "devices.h"
#include "driver_unsupported.h"
#include "memory.h"
#include "result.h"

namespace simulated_gpu {
namespace {

// The runtime's errors have the driver's numbers.
CUresult result(cudaError_t error) { return static_cast<CUresult>(error); }

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
}

void* find_function(const std::string& name) {
  static void* const self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  for (const char* version : {"_v2", ""}) {
    if (void* function = dlsym(self, (name + version).c_str())) return function;
  }
  return unsupported_function(name);
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                        unsigned long long,
                                                        cudaDriverEntryPointQueryResult* status) {
  return call([&] {
    *function = find_function(name);
    if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  });
}

extern "C" CUresult cuDriverGetVersion(int* version) {
  return static_cast<CUresult>(cudaDriverGetVersion(version));
}

extern "C" CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

extern "C" CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return result(call([&] { check_device(ordinal); }));
}

extern "C" CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  return result(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(which), device));
}

extern "C" CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}

extern "C" CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

extern "C" CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}

extern "C" CUresult cuCtxSetCurrent(CUcontext context) {
  if (context == nullptr) return CUDA_SUCCESS;
  return result(cudaSetDevice(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1));
}

extern "C" CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which,
                                          CUdeviceptr address) {
  return result(call([&] {
    const auto allocation = memory().find(reinterpret_cast<const void*>(address));
    require(allocation.has_value(), cudaErrorInvalidValue);
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
      *static_cast<int*>(value) = allocation->device;
    } else if (which == CU_POINTER_ATTRIBUTE_CONTEXT) {
      *static_cast<CUcontext*>(value) = context_of(allocation->device);
    } else if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
      *static_cast<unsigned*>(value) =
          allocation->is_on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    } else {
      fail_unsupported("cuPointerGetAttribute of attribute " + std::to_string(which));
    }
  }));
}

extern "C" CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* num_bytes,
                                         CUdeviceptr address) {
  return result(call([&] {
    const auto allocation = memory().find(reinterpret_cast<const void*>(address));
    require(allocation && allocation->is_on_device(), cudaErrorInvalidValue);
    if (base != nullptr) *base = reinterpret_cast<CUdeviceptr>(allocation->base);
    if (num_bytes != nullptr) *num_bytes = allocation->num_bytes;
  }));
}

// The driver has nothing to log.
extern "C" CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle*) {
  return CUDA_SUCCESS;
}
extern "C" CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
