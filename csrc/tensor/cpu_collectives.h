// Collectives on CPU tensors: checks, plans and packs them, and runs them in the caller's thread
// or, in order, on a progress thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/communicator.h"
#include "tensor/collectives.h"
#include "tensor/request_work.h"
#include "tensor/sharded_bucket.h"
#include "tensor/work_queue.h"

namespace rota::tensors {

class CpuCollectives final : public Collectives {
 public:
  // check_interrupt runs while a caller waits for the progress thread, and may throw.
  CpuCollectives(std::shared_ptr<Communicator> communicator, std::function<void()> check_interrupt);

  at::Device device() const override { return at::kCPU; }
  std::string peer_access() const override { return "the host's memory"; }

  WorkRef run(OperationList operations, Launch mode) override;
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                        Launch mode) override;
  // Half of that: each rank gets the sums of its own pieces.
  WorkRef reduce_shards(const ShardedBucketRef& shards, const BucketTensors& tensors,
                        const BucketOptions& options, Launch mode);
  // The other half: updates own pieces, and sends them to all.
  void update_shards(const ShardedBucketRef& shards, const cpu::UpdateSteps& steps);
  // The sum of sparse tensors (sparse_all_reduce.h).
  WorkRef all_reduce_sparse(const at::Tensor& tensor, Launch mode, OwnTimeout timeout);
  WorkRef transfer(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                   Launch mode) override;
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
  bool runs_at_once(Launch mode) const { return mode == Launch::kBlocking && queue_.is_idle(); }
  // Runs body(communicator, thread) in this thread. A profiler shows the sizes of results().
  template <typename Results, typename Body>
  void run_here(const char* title, const Results& results, const Body& body);
  // Runs body(communicator, thread) on a progress thread. results: of the work.
  template <typename Body>
  WorkRef enqueue(Launch mode, CollectiveKind kind, std::vector<at::Tensor> results, Body body);

  int rank_;
  std::shared_ptr<Communicator> communicator_;  // null once closed; queued tasks share it
  std::function<void()> check_interrupt_;
  Planner planner_;
  WorkQueue queue_;
};

}  // namespace rota::tensors
