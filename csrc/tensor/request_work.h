// A send or recv of a CPU tensor, and the handle of one that the caller does not wait for.
#pragma once

#include <memory>

#include "core/communicator.h"
#include "tensor/collectives.h"
#include "tensor/tensor_checks.h"
#include "tensor/work.h"

namespace rota::tensors {

// What a send or recv moves; refers to the tensor.
class PackedMessage {
 public:
  PackedMessage(Direction direction, const at::Tensor& tensor);

  // Blocks until it has been moved. Throws Error.
  void run(Communicator& communicator, int peer, uint64_t tag, CallerThread thread) const;
  // Does not block. Throws Error.
  RequestRef start(Communicator& communicator, int peer, uint64_t tag,
                   PointToPoint::OnDone on_done) const;
  // Call it once the request is done.
  void unpack() const;

 private:
  Message message(uint64_t tag) const;

  Direction direction_;
  const at::Tensor& tensor_;
  Packed packed_;
  at::Storage memory_;  // so that it counts as held (heap_tensor.h)
};

class RequestWork final : public HostWork {
 public:
  // Starts the request. With kAnyRank as peer, receives from any rank. Throws Error.
  static c10::intrusive_ptr<RequestWork> start(Direction direction,
                                               std::shared_ptr<Communicator> communicator,
                                               const at::Tensor& tensor, int peer, uint64_t tag,
                                               std::function<void()> check_interrupt);
  // For start() only; public because make_intrusive needs it.
  RequestWork(Direction direction, std::shared_ptr<Communicator> communicator,
              const at::Tensor& tensor, std::function<void()> check_interrupt);

  // Lets the request proceed whether or not anybody waits for it.
  void attend();
  // Also moves messages for all other requests of this communicator while it waits.
  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  int sourceRank() const override { return request_->peer(); }

 private:
  void complete_request(const Request& request);

  Direction direction_;
  std::shared_ptr<Communicator> communicator_;
  PackedMessage message_;
  RequestRef request_;
};

}  // namespace rota::tensors
