// Errors of the CUDA runtime, as this project's.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "base/error.h"

namespace rota::transport {

inline void check_cuda(cudaError_t status, std::string_view call) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::kTransport, join(call, " failed: ", cudaGetErrorString(status), " (",
                                          cudaGetErrorName(status), ")"));
}

}  // namespace rota::transport
