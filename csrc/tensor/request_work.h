// The handle of a send or recv of a CPU tensor.
#pragma once

#include <memory>

#include "core/communicator.h"
#include "tensor/collectives.h"
#include "tensor/tensor_checks.h"
#include "tensor/work.h"

namespace rota::tensors {

class RequestWork final : public HostWork {
 public:
  // Starts the request, which proceeds whether or not anybody waits. A blocking one is done on
  // return. With kAnyRank as peer, receives from any rank. Throws Error.
  static c10::intrusive_ptr<RequestWork> start(Direction direction,
                                               std::shared_ptr<Communicator> communicator,
                                               const at::Tensor& tensor, int peer, uint64_t tag,
                                               std::function<void()> check_interrupt, Launch mode);
  // For start() only; public because make_intrusive needs it.
  RequestWork(Direction direction, std::shared_ptr<Communicator> communicator,
              const at::Tensor& tensor, std::function<void()> check_interrupt);

  // Also moves messages for all other requests of this communicator while it waits.
  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  int sourceRank() const override { return request_->peer(); }

 private:
  void complete_request(const Request& request);

  Direction direction_;
  std::shared_ptr<Communicator> communicator_;
  Packed packed_;
  RequestRef request_;
};

}  // namespace rota::tensors
