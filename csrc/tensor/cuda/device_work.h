// A collective on a GPU that torch can wait for: streams wait, the host does not.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "core/communicator.h"
#include "tensor/work.h"

namespace rota::tensors {

class DeviceWork final : public Work {
 public:
  // Covers what has been queued on `stream` so far.
  DeviceWork(std::shared_ptr<const Communicator> communicator, ::c10d::OpType op_type,
             const char* title, std::vector<at::Tensor> tensors, c10::Stream stream);

  // Makes the current stream wait. Throws the error that ended the group, if it is known by now.
  // Ignores `timeout`: kernels apply the group's.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return event_.query(); }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::TypePtr type,
                                                      c10::IValue value) override;

  std::shared_ptr<const Communicator> communicator_;
  std::string title_;
  c10::Stream stream_;
  c10::Event event_;
};

}  // namespace rota::tensors
