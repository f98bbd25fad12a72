// torch's streams as native ones, for launching kernels.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/launch.h"

namespace rota::tensors {

inline cuda::Stream current_stream(c10::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return static_cast<cuda::Stream>(stream.native_handle());
}

}  // namespace rota::tensors
