// torch's streams: as native ones, for launching kernels, and after each other.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/launch.h"

namespace rota::tensors {

inline cuda::Stream current_stream(c10::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  return static_cast<cuda::Stream>(stream.native_handle());
}

// What `second` gets from here on runs after what `first` has got.
inline void put_behind(const c10::Stream& first, const c10::Stream& second) {
  c10::Event event(first.device_type());
  event.record(first);
  event.block(second);
}

// `stream` works on the tensors after what is queued on the current stream of its device. Keeps the
// allocator from reusing their memory meanwhile, also if what is to work on them throws when it has
// queued a part.
inline void hand_over(at::TensorList tensors, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  put_behind(guard.getStream(stream.device()), stream);
  for (const at::Tensor& tensor : tensors) {
    guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

}  // namespace rota::tensors
