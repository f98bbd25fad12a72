// Collectives on CPU tensors: checks, plans and packs them, and runs them in the caller's thread
// or, in order, on a progress thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/communicator.h"
#include "core/progress_queue.h"
#include "tensor/collectives.h"
#include "tensor/request_work.h"

namespace rota::tensors {

class CpuCollectives final : public Collectives {
 public:
  // check_interrupt runs while a caller waits for the progress thread, and may throw.
  CpuCollectives(std::shared_ptr<Communicator> communicator, std::function<void()> check_interrupt);

  at::Device device() const override { return at::kCPU; }
  std::string peer_access() const override { return "the host's memory"; }

  WorkRef all_reduce(at::TensorList tensors, const AllReduceOptions& options, Launch mode) override;
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                        Launch mode) override;
  WorkRef broadcast(at::TensorList tensors, int root, Launch mode) override;
  WorkRef all_gather(std::vector<AllGatherTensors> gathers, Launch mode) override;
  bool has_reduce_scatter(at::ScalarType) const override { return false; }
  WorkRef reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                         Launch mode) override;
  bool has_transfers() const override { return true; }
  WorkRef send(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) override;
  WorkRef recv(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) override;
  WorkRef barrier(Launch mode);
  void finish(const std::function<void()>& check_interrupt) override;

  // Runs task(thread) after all queued work and blocks until it ends. What the task refers to must
  // outlive it, because check_interrupt may throw before it ends.
  void run_in_turn(const char* title, std::function<void(CallerThread)> task);

  // Null once closed.
  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  // Throws Error(kInternal) once closed, and what Communicator::check_usable() throws. Call it
  // before queueing a task: a forked child has no thread to run it.
  void check_usable(std::string_view call) const;

  // Finishes queued work and aborts pending work. Idempotent.
  void end_progress();
  // Leaves the group after queued work is done. Idempotent.
  void close();

 private:
  WorkRef request(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                  Launch mode);
  // Runs body(communicator, tensors, thread) in this thread or on a progress thread.
  template <typename Body>
  WorkRef launch(Launch mode, ::c10d::OpType op_type, const char* title, at::TensorList tensors,
                 Body&& body);

  int rank_;
  std::shared_ptr<Communicator> communicator_;  // null once closed; queued tasks share it
  std::function<void()> check_interrupt_;
  Planner planner_;
  ProgressQueue queue_;
};

}  // namespace rota::tensors
