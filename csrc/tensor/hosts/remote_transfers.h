// send and recv between ranks of different hosts, and recv from any rank of any host. A message is
// an envelope, which says what follows, and its data, which the receiver asks for once it knows
// that it fits.
//
// A recv takes no thread until its envelope is there. Then its data is on its way, and so is what
// this rank sends, since the receiver takes in at once what no recv has asked for. All of this ends
// whatever ranks do next, so one borrowed thread waits for sends in the order of their calls, and
// another for data in the order of its envelopes, and neither waits for what waits for it.
#pragma once

#include <atomic>
#include <functional>
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

  // As Collectives::transfer(); peers on this host only by kAnyRank.
  WorkRef start(Direction direction, const at::Tensor& tensor, int peer, int64_t tag, Launch mode);

  bool has_unfinished() const { return num_unfinished_ > 0; }
  // Blocks until all data has been sent.
  void finish_sends();
  // Waits for all, which Bridge::abort() ends.
  void close();

 private:
  class Transfer;

  void check(Direction direction, const at::Tensor& tensor, int peer, int64_t tag) const;
  void queue_end(const c10::intrusive_ptr<Transfer>& send);
  // Sees to it that a thread looks for messages of this host.
  void look_for(Transfer& recv);
  // While recvs from any rank have none.
  void look();

  hosts::Bridge& bridge_;
  std::function<void()> check_interrupt_;
  std::atomic<int64_t> num_sends_{0};
  std::atomic<int> num_unfinished_{0};
  std::mutex mutex_;
  // Guarded by it.
  WorkRef last_send_;  // may be done
  bool is_looking_ = false;
  // Each has a thread while it has tasks.
  ProgressQueue sending_, receiving_, looking_;
};

}  // namespace rota::tensors
