// send and recv between ranks of different hosts. A message is an envelope, which says what follows,
// and its data, which the receiver asks for once it knows that it fits.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "core/progress_queue.h"
#include "tensor/collectives.h"
#include "tensor/hosts/bridge.h"

namespace rota::tensors {

class RemoteTransfers {
 public:
  // bridge outlives this.
  RemoteTransfers(Bridge& bridge, std::function<void()> check_interrupt)
      : bridge_(bridge), check_interrupt_(std::move(check_interrupt)) {}
  ~RemoteTransfers() { close(); }

  // As Collectives::send() and recv(). Each runs on a borrowed thread, since waits for the engine
  // cannot be combined.
  WorkRef start(Direction direction, const at::Tensor& tensor, int peer, int64_t tag, Launch mode);

  bool has_unfinished() const { return num_unfinished_ > 0; }
  // Blocks until all data has been sent.
  void finish_sends(const std::function<void()>& check_interrupt);
  // Waits for all, which Bridge::abort() ends.
  void close();

 private:
  struct Request;

  void check(Direction direction, const at::Tensor& tensor, int peer, int64_t tag) const;
  void send(Request& request);
  void recv(Request& request);

  Bridge& bridge_;
  std::function<void()> check_interrupt_;
  std::atomic<int64_t> num_sends_{0};
  std::atomic<int> num_unfinished_{0};
  std::mutex mutex_;
  std::list<ProgressQueue> threads_;  // guarded by it: one for each request, until that is done
  std::list<WorkRef> sends_;          // guarded by it: some that may not be done
};

}  // namespace rota::tensors
