// torch's streams, as kernels are launched on them.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/launch.h"

namespace rota::c10d_glue {

inline cuda::Stream native(const c10::Stream& stream) {
  return static_cast<cuda::Stream>(stream.native_handle());
}

inline cuda::Stream current_stream(c10::Device device) {
  return native(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace rota::c10d_glue
