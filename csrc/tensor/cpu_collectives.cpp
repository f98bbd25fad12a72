#include "tensor/cpu_collectives.h"

#include <ATen/record_function.h>

#include "base/cores.h"
#include "core/call_scope.h"
#include "cpu/exchange.h"
#include "tensor/errors.h"
#include "tensor/packed_operation.h"
#include "tensor/sparse_all_reduce.h"

namespace rota::tensors {
namespace {

void run_operation(const Operation& operation, const Call& call, Communicator& communicator,
                   CallerThread thread) {
  run_on_cpu(operation, call, communicator.rank(), communicator.world_size(),
             [&](const cpu::Buffers& buffers) {
               communicator.run(call, buffers, thread, operation.timeout);
             });
}

}  // namespace

CpuCollectives::CpuCollectives(std::shared_ptr<Communicator> communicator,
                               std::function<void()> check_interrupt)
    : rank_(communicator->rank()),
      communicator_(std::move(communicator)),
      check_interrupt_(std::move(check_interrupt)),
      planner_(communicator_->world_size(), std::nullopt, communicator_->transport().node_size()),
      queue_(rank_, communicator_.get(),
             communicator_->world_size() < num_usable_cores()
                 ? ProgressQueue::Placement::kAnyCore
                 : ProgressQueue::Placement::kCoreOfCaller,
             check_interrupt_) {}

template <typename Results, typename Body>
void CpuCollectives::run_here(const char* title, const Results& results, const Body& body) {
  const auto shown = [&] {
    const std::vector<at::Tensor> tensors = results();
    return std::vector<c10::IValue>(tensors.begin(), tensors.end());
  };
  // Shows this call to profilers, as Work does for a queued one; costs 16 ns without a profiler,
  // since only one evaluates shown().
  RECORD_USER_SCOPE_WITH_INPUTS(title, shown());
  // A copy of the pointer, because a signal handler or a callback may close the communicator
  // meanwhile.
  const std::shared_ptr<Communicator> communicator = communicator_;
  body(*communicator, CallerThread::kUser);
}

template <typename Body>
WorkRef CpuCollectives::enqueue(Launch mode, CollectiveKind kind, std::vector<at::Tensor> results,
                                Body body) {
  const auto work = queue_.enqueue(kind, std::move(results),
                                   [communicator = communicator_, body = std::move(body)] {
                                     body(*communicator, CallerThread::kProgress);
                                   });
  if (mode == Launch::kAsync) return work;
  work->await_end();
  return {};
}

WorkRef CpuCollectives::run(OperationList operations, Launch mode) {
  // Most calls have one operation, for which this allocates nothing.
  c10::SmallVector<Call, 1> calls;
  for (const Operation& operation : operations) {
    calls.push_back(plan(operation, planner_, rank_, at::kCPU));
  }
  if (operations.empty()) return {};
  check_apart(operations);
  const CollectiveKind kind = operations[0].kind;
  if (runs_at_once(mode)) {
    const auto body = [&](Communicator& communicator, CallerThread thread) {
      for (size_t i = 0; i < operations.size(); ++i) {
        run_operation(operations[i], calls[i], communicator, thread);
      }
    };
    run_here(row_of(kind).title.data(), [&] { return results_of(operations); }, body);
    return {};
  }
  std::vector<OwnedOperation> owned(operations.begin(), operations.end());
  return enqueue(mode, kind, results_of(operations),
                 [owned = std::move(owned), calls = std::move(calls), planner = planner_](
                     Communicator& communicator, CallerThread thread) {
                   for (size_t i = 0; i < owned.size(); ++i) {
                     const Operation operation = owned[i].view();
                     check_unchanged(
                         calls[i],
                         [&] { return plan(operation, planner, communicator.rank(), at::kCPU); },
                         [&](const Call& withdrawn) {
                           communicator.agree(withdrawn, thread, operation.timeout);
                         });
                     run_operation(operation, calls[i], communicator, thread);
                   }
                 });
}

WorkRef CpuCollectives::reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                                      Launch mode) {
  const Call call = plan(tensors, planner_, options);
  const auto body = [tensors, call](Communicator& communicator, CallerThread thread) {
    run_bucket(tensors,
               [&](const cpu::Buffers& buffers) { communicator.run(call, buffers, thread); });
  };
  if (!runs_at_once(mode)) {
    return enqueue(mode, call.kind, {tensors.bucket},
                   [=, planner = planner_](Communicator& communicator, CallerThread thread) {
                     check_unchanged(
                         call, [&] { return plan(tensors, planner, options); },
                         [&](const Call& withdrawn) { communicator.agree(withdrawn, thread); });
                     body(communicator, thread);
                   });
  }
  run_here(row_of(call.kind).title.data(), [&] { return std::vector{tensors.bucket}; }, body);
  return {};
}

WorkRef CpuCollectives::reduce_shards(const ShardedBucketRef& shards, const BucketTensors& tensors,
                                      const BucketOptions& options, Launch mode) {
  const Call call = shards->plan_reduction(tensors, planner_, options);
  const size_t slot_bytes = communicator_->transport().geometry().slot_bytes;
  const int world_size = communicator_->world_size();
  if (call.wire.capacity(cpu::Exchange::share_of_slot(slot_bytes, world_size), kTileElems) == 0) {
    throw Error(ErrorKind::kValue,
                join("rota.reduce_shards: slot_bytes is ", slot_bytes, ", too short for ",
                     world_size, " ranks; give the communicator at least ",
                     (call.wire.num_bytes(kTileElems) + kCacheLineBytes) *
                         static_cast<size_t>(world_size - 1)));
  }
  const auto body = [shards, tensors, call](Communicator& communicator, CallerThread thread) {
    shards->run_reduction(
        tensors, [&](const cpu::Buffers& buffers) { communicator.run(call, buffers, thread); });
  };
  if (!runs_at_once(mode)) {
    return enqueue(mode, call.kind, {tensors.bucket},
                   [=, planner = planner_](Communicator& communicator, CallerThread thread) {
                     check_unchanged(
                         call, [&] { return shards->plan_reduction(tensors, planner, options); },
                         [&](const Call& withdrawn) { communicator.agree(withdrawn, thread); });
                     body(communicator, thread);
                   });
  }
  run_here(row_of(call.kind).title.data(), [&] { return std::vector{tensors.bucket}; }, body);
  return {};
}

void CpuCollectives::update_shards(const ShardedBucketRef& shards, const cpu::UpdateSteps& steps) {
  const Call call = shards->plan_update(steps);
  const auto body = [shards, steps, call](Communicator& communicator, CallerThread thread) {
    shards->run_update(
        steps, [&](const cpu::Buffers& buffers) { communicator.run(call, buffers, thread); });
  };
  if (!runs_at_once(Launch::kBlocking)) {
    enqueue(Launch::kBlocking, call.kind, shards->parameters(), body);
    return;
  }
  run_here(row_of(call.kind).title.data(), [&] { return shards->parameters(); }, body);
}

WorkRef CpuCollectives::all_reduce_sparse(const at::Tensor& tensor, Launch mode,
                                          OwnTimeout timeout) {
  check_sparse(tensor);
  const auto body = [tensor, timeout](Communicator& communicator, CallerThread thread) {
    const Planner planner(communicator.world_size());
    const Call call{.kind = CollectiveKind::kAllReduce};
    check_unchanged(
        call, [&] { return check_sparse(tensor), call; },
        [&](const Call& withdrawn) { communicator.agree(withdrawn, thread, timeout); });
    tensors::all_reduce_sparse(
        tensor, communicator.rank(), communicator.world_size(), [&](Operation& operation) {
          operation.timeout = timeout;
          run_operation(operation, plan(operation, planner, communicator.rank(), at::kCPU),
                        communicator, thread);
        });
  };
  const CollectiveKind kind = CollectiveKind::kAllReduce;
  if (!runs_at_once(mode)) return enqueue(mode, kind, {tensor}, body);
  run_here(row_of(kind).title.data(), [&] { return std::vector{tensor}; }, body);
  return {};
}

WorkRef CpuCollectives::transfer(Direction direction, const at::Tensor& tensor, int peer,
                                 int64_t signed_tag, Launch mode) {
  check_tensor(tensor, name(direction));
  if (signed_tag < 0) {
    throw Error(ErrorKind::kValue,
                join("rota.", name(direction), ": tag is ", signed_tag, ", expected 0 or more"));
  }
  const auto tag = static_cast<uint64_t>(signed_tag);
  if (mode == Launch::kBlocking && peer != kAnyRank) {
    const auto body = [&](Communicator& communicator, CallerThread thread) {
      const CallScope scope(&communicator, name(direction), CallScope::Kind::kWait);
      PackedMessage(direction, tensor).run(communicator, peer, tag, thread);
    };
    run_here(title_of(direction), [&] { return std::vector{tensor}; }, body);
    return {};
  }
  const auto work =
      RequestWork::start(direction, communicator_, tensor, peer, tag, check_interrupt_);
  if (mode == Launch::kBlocking) {
    work->wait(kNoTimeout);
  } else {
    work->attend();
  }
  return work;
}

void CpuCollectives::run_in_turn(const char* title, std::function<void(CallerThread)> task) {
  const auto body = [task = std::move(task)](Communicator&, CallerThread thread) { task(thread); };
  if (runs_at_once(Launch::kBlocking)) {
    return run_here(title, [] { return std::vector<at::Tensor>(); }, body);
  }
  enqueue(Launch::kBlocking, CollectiveKind::kBarrier, {}, body);
}

void CpuCollectives::check_usable(std::string_view call) const {
  if (!communicator_) {
    throw Error(ErrorKind::kInternal, "rota: this communicator is closed; make a new one");
  }
  communicator_->check_usable(call);
}

void CpuCollectives::finish(const std::function<void()>& check_interrupt) {
  communicator_->point_to_point().finish(CallerThread::kUser);
  queue_.finish(check_interrupt);
}

void CpuCollectives::end_progress() {
  if (communicator_) {
    PointToPoint& links = communicator_->point_to_point();
    if (queue_.has_unfinished() || links.has_unfinished_sends()) {
      communicator_->abort(join("rank ", rank_, " dropped its communicator with work pending"));
    }
    links.close();
  }
  queue_.close();
}

void CpuCollectives::close() {
  queue_.close();
  communicator_->point_to_point().close();
  communicator_.reset();
}

}  // namespace rota::tensors
