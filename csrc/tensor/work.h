// A collective's handle for torch.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "base/fork_generation.h"
#include "core/progress_queue.h"

namespace rota::tensors {

class Work : public ::c10d::Work {
 public:
  // Holds the list of tensors, as torch.distributed expects.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() final;
  // Holds the first tensor as a Python object, as DDP expects from a Python hook. Call it with the
  // GIL held.
  c10::intrusive_ptr<c10::ivalue::Future> hook_future();

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  std::vector<at::Tensor> result() final { return tensors_; }

 protected:
  // tensors: the value of its futures, before and after it is done; a profiler shows their sizes.
  Work(int rank, ::c10d::OpType op_type, const char* title, std::vector<at::Tensor> tensors)
      : ::c10d::Work(rank, op_type, title, tensors), tensors_(std::move(tensors)) {}

  // Returns a future that holds `value` once this work is done.
  virtual c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::TypePtr type,
                                                              c10::IValue value) = 0;

  const std::vector<at::Tensor> tensors_;
};

// Work that a thread of this host completes.
class HostWork : public Work {
 public:
  using Clock = std::chrono::steady_clock;

  // communicator: whose turn the call needs, as in CallScope; null: none. called: when the call
  // began; none: its duration is unknown.
  HostWork(int rank, ::c10d::OpType op_type, const char* title, std::vector<at::Tensor> tensors,
           std::function<void()> check_interrupt, const void* communicator = nullptr,
           std::optional<Clock::time_point> called = Clock::now());

  // For calls that have blocked until done, or have queued their work on the GPU's current stream.
  static c10::intrusive_ptr<Work> completed(int rank, ::c10d::OpType op_type,
                                            std::vector<at::Tensor> tensors,
                                            std::optional<Clock::time_point> called = {});

  // Completes the work, with an error if there is an exception. Call once. Callbacks of its futures
  // may block, and wait for later calls: they run on a thread of `callbacks`, or here if that is
  // null, where this thread leaves its queue first.
  void complete(std::exception_ptr exception, ProgressQueue* callbacks = nullptr);

  // Blocks until done. Throws the collective's error, or rota::Error(kTimeout) after `timeout`
  // unless that is kNoTimeout, or Error(kInternal) inside a collective of the same communicator,
  // which the call may have to wait for. Ctrl-C interrupts the wait; the collective goes on in
  // either case. In a forked child, where nobody would complete the work, this and isCompleted()
  // throw Error(kInternal) unless it is done.
  bool wait(std::chrono::milliseconds timeout) override;
  bool isCompleted() override;
  // The same as wait() for the call itself, and for what is done but for its last steps.
  void await_end(std::chrono::milliseconds timeout = kNoTimeout);

  // In milliseconds, from the call to its end: includes the wait for other ranks and for earlier
  // calls. Throws if the work is not done.
  float getDuration() const override;

 private:
  c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::TypePtr type,
                                                      c10::IValue value) override;
  void check_process() const;

  const uint64_t fork_generation_ = fork_generation();
  std::function<void()> check_interrupt_;
  const void* communicator_;
  std::optional<Clock::time_point> called_;
  Clock::time_point ended_;  // set before completed_

  struct Pending {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    c10::IValue value;
  };
  std::vector<Pending> futures_;  // guarded by mutex_
};

using WorkRef = c10::intrusive_ptr<Work>;

}  // namespace rota::tensors
