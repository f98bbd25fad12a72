// Replaces this folder's .cu files in a CPU-only build.
#if !defined(ROTA_WITH_CUDA)

#include "base/error.h"
#include "cuda/device_info.h"

namespace rota::cuda {

std::vector<std::string> archs() { return {}; }

std::vector<std::string> devices() {
  throw Error(ErrorKind::kTransport, "this build of rota is for the CPU");
}

GpuInfo gpu_info(int) { throw Error(ErrorKind::kTransport, "this build of rota is for the CPU"); }

}  // namespace rota::cuda

#endif
