// send and recv between ranks of different hosts, and recv from any rank of any host. A message is
// an envelope, which says what follows, and its data, which the receiver asks for once it knows
// that it fits.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "core/progress_queue.h"
#include "hosts/bridge.h"
#include "tensor/collectives.h"

namespace rota::tensors {

class RemoteTransfers {
 public:
  // bridge outlives this.
  RemoteTransfers(hosts::Bridge& bridge, std::function<void()> check_interrupt)
      : bridge_(bridge), check_interrupt_(std::move(check_interrupt)) {}
  ~RemoteTransfers() { close(); }

  // As Collectives::send() and recv(); peers on this host only by kAnyRank. Each transfer runs on a
  // borrowed thread, since waits for the engine cannot be combined.
  WorkRef start(Direction direction, const at::Tensor& tensor, int peer, int64_t tag, Launch mode);

  bool has_unfinished() const { return num_unfinished_ > 0; }
  // Blocks until all data has been sent.
  void finish_sends();
  // Waits for all, which Bridge::abort() ends.
  void close();

 private:
  class Transfer;

  void check(Direction direction, const at::Tensor& tensor, int peer, int64_t tag) const;

  hosts::Bridge& bridge_;
  std::function<void()> check_interrupt_;
  std::atomic<int64_t> num_sends_{0};
  std::atomic<int> num_unfinished_{0};
  std::mutex any_mutex_;  // one recv from any rank looks for messages of this host at a time
  std::mutex mutex_;
  // Guarded by it.
  std::list<ProgressQueue> threads_;  // one for each transfer, until that is done
  std::list<WorkRef> sends_;          // some of them may be done
};

}  // namespace rota::tensors
