// A group's asynchronous calls: runs them in order on a progress thread, each with a Work.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "core/progress_queue.h"
#include "schedule/collective.h"
#include "tensor/work.h"

namespace rota::tensors {

class WorkQueue {
 public:
  // communicator: as in CallScope. check_interrupt runs while a caller waits for a Work, and may
  // throw.
  WorkQueue(int rank, const void* communicator, ProgressQueue::Placement placement,
            std::function<void()> check_interrupt)
      : rank_(rank),
        communicator_(communicator),
        check_interrupt_(std::move(check_interrupt)),
        queue_(placement) {}

  // Queues body(). results: of the work.
  c10::intrusive_ptr<HostWork> enqueue(CollectiveKind kind, std::vector<at::Tensor> results,
                                       std::function<void()> body);
  // Whether a work is not done. The queue may be busy a little longer.
  bool has_unfinished() const { return *num_unfinished_ > 0; }
  // True where the caller may run its call itself (core/progress_queue.h).
  bool is_idle() const { return queue_.is_idle(); }
  // Blocks until all queued calls have ended.
  void finish(const std::function<void()>& check_interrupt);
  // As ProgressQueue::close().
  void close() { queue_.close(); }

 private:
  int rank_;
  const void* communicator_;
  std::function<void()> check_interrupt_;
  std::shared_ptr<std::atomic<int>> num_unfinished_ = std::make_shared<std::atomic<int>>(0);
  ProgressQueue queue_;
};

}  // namespace rota::tensors
