// Errors of the CUDA runtime, as this project's.
#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "base/error.h"

namespace rota::transport {

// The runtime also keeps an error as the last one of the thread, where torch would find it after
// the next kernel and take it for that kernel's.
inline void forget_error(cudaError_t status) {
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
}

inline void check_cuda(cudaError_t status, std::string_view call) {
  if (status == cudaSuccess) return;
  forget_error(status);
  throw Error(ErrorKind::kTransport, join(call, " failed: ", cudaGetErrorString(status), " (",
                                          cudaGetErrorName(status), ")"));
}

}  // namespace rota::transport
