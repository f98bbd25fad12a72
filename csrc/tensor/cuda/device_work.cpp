#include "tensor/cuda/device_work.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tensor/errors.h"

namespace rota::tensors {

DeviceWork::DeviceWork(std::shared_ptr<const Communicator> communicator, ::c10d::OpType op_type,
                       const char* title, std::vector<at::Tensor> tensors, c10::Stream stream)
    // The base gets no title: nothing would end its profiler range, and launch() has recorded one.
    : Work(communicator->rank(), op_type, nullptr, std::move(tensors)),
      communicator_(std::move(communicator)),
      title_(title),
      stream_(stream),
      event_(stream.device_type()) {
  event_.record(stream_);
}

bool DeviceWork::wait(std::chrono::milliseconds) {
  with_python_errors([&] { communicator_->check_usable(title_); });
  event_.block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
  return true;
}

// Complete at once: the future carries the stream, and whoever waits for it waits for the stream.
c10::intrusive_ptr<c10::ivalue::Future> DeviceWork::make_future(c10::TypePtr type,
                                                                c10::IValue value) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      std::move(type), std::vector<c10::Device>{stream_.device()});
  const c10::StreamGuard on_stream(stream_);
  future->markCompleted(std::move(value));
  return future;
}

}  // namespace rota::tensors
