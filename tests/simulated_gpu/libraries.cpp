#include "libraries.h"

#include <dlfcn.h>

#include <string>

#include "result.h"

namespace simulated_gpu {

void* load_beside(const char* file) {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&load_beside), &info);
  const std::string self = info.dli_fname;
  const std::string path = self.substr(0, self.rfind('/') + 1) + file;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail_unsupported(dlerror());
  return library;
}

}  // namespace simulated_gpu
