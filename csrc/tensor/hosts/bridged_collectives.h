// Collectives on CPU tensors of ranks on several hosts: plans them for all ranks, and runs them in
// order on a progress thread, since waits for other hosts cannot be interrupted. Reductions,
// all-gather and broadcast are hierarchical; what goes from one rank to another goes through shared
// memory or through the engine.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "base/fork_generation.h"
#include "core/plan.h"
#include "hosts/bridge.h"
#include "hosts/reducers.h"
#include "hosts/scratch.h"
#include "tensor/collectives.h"
#include "tensor/cpu_collectives.h"
#include "tensor/hosts/remote_transfers.h"
#include "tensor/work_queue.h"

namespace rota::tensors {

class BridgedCollectives final : public Collectives {
 public:
  // local: of this host's ranks; outlives this. inter_wire: what sums of wider floats travel in
  // between hosts where the call names none; none: their accumulate dtype.
  BridgedCollectives(std::unique_ptr<hosts::Bridge> bridge, CpuCollectives& local,
                     std::optional<WireFormat> inter_wire, std::function<void()> check_interrupt);

  at::Device device() const override { return at::kCPU; }
  std::string peer_access() const override;

  WorkRef run(OperationList operations, Launch mode) override;
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                        Launch mode) override;
  WorkRef all_reduce_sparse(const at::Tensor& tensor, Launch mode, OwnTimeout timeout);
  WorkRef transfer(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                   Launch mode) override;
  void finish(const std::function<void()>& check_interrupt) override;

  // ---- for collectives of CUDA tensors, which only compare calls here

  hosts::Bridge& bridge() { return *bridge_; }
  // What a caller asks of ranks on several hosts. Throws Error.
  Call planned(const Operation& operation, at::Device device) const;
  Call planned(const BucketTensors& tensors, const BucketOptions& options) const;
  hosts::LevelOrders orders_of(const Call& call) const;
  // Runs body() on the progress thread, after all queued calls, and blocks until it ends. What the
  // body refers to must outlive it, because a signal may end the wait before.
  void run_in_turn(CollectiveKind kind, std::function<void()> body);

  void check_usable(std::string_view call) const { bridge_->check_usable(call); }
  void abort(const std::string& reason);
  // Aborts pending work. Idempotent.
  void end_progress();
  // Leaves the group, once queued work is done. Later calls must not come.
  void close();
  ~BridgedCollectives() override { close(); }

 private:
  // Queues body(), which runs one operation.
  template <typename Body>
  WorkRef enqueue(Launch mode, CollectiveKind kind, std::vector<at::Tensor> results, Body body);
  WireFormat wire_of(const Call& call, bool is_asked_for) const;
  // A forked child has a copy of the parent's connections, but none of its threads.
  bool is_forked_child() const { return fork_generation_ != fork_generation(); }
  // In the queue's thread.
  void run_here(const Operation& operation, const Call& call);
  void execute(const Call& call, const cpu::Buffers& buffers, OwnTimeout timeout);
  // As check_unchanged() of operation.h wants it.
  void withdraw(const Call& call, OwnTimeout timeout);

  const uint64_t fork_generation_ = fork_generation();
  int rank_;
  std::unique_ptr<hosts::Bridge> bridge_;
  CpuCollectives& local_;
  std::optional<WireFormat> inter_wire_;
  Planner planner_;
  hosts::Scratch scratch_;  // of the queue's thread
  RemoteTransfers remote_;
  WorkQueue queue_;
};

}  // namespace rota::tensors
