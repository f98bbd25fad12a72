// A send or recv of a CPU tensor that torch can wait for.
#pragma once

#include <memory>

#include "core/communicator.h"
#include "tensor/collectives.h"
#include "tensor/tensor_checks.h"
#include "tensor/work.h"

namespace rota::tensors {

class RequestWork final : public HostWork {
 public:
  // Starts the request, which then goes on whether or not anybody waits; a blocking one is done
  // when this returns. peer: kAnyRank takes a message of any rank. Throws Error.
  static c10::intrusive_ptr<RequestWork> start(Direction direction,
                                               std::shared_ptr<Communicator> communicator,
                                               const at::Tensor& tensor, int peer, uint64_t tag,
                                               std::function<void()> check_interrupt, Launch mode);
  // Called by start() alone; public because intrusive pointers make their objects.
  RequestWork(Direction direction, std::shared_ptr<Communicator> communicator,
              const at::Tensor& tensor, std::function<void()> check_interrupt);

  // Moves the messages of all requests of this communicator meanwhile.
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
