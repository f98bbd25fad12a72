// The other libraries of the simulation, which lie beside this one and are loaded when they are
// needed.
#pragma once

#include <dlfcn.h>

#include <string>

#include "result.h"

namespace simulated_gpu {

inline constexpr const char* kKernelsLibrary = "librota_kernels.so";
inline constexpr const char* kOperatorsLibrary = "libtorch_operators.so";
inline constexpr const char* kSymmetricMemoryLibrary = "libtorch_symmetric_memory.so";

// Its handle; fails where it cannot be loaded.
inline void* load_beside(const char* file) {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&load_beside), &info);
  const std::string self = info.dli_fname;
  const std::string path = self.substr(0, self.rfind('/') + 1) + file;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail_unsupported(dlerror());
  return library;
}

}  // namespace simulated_gpu
