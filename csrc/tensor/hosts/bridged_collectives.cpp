#include "tensor/hosts/bridged_collectives.h"

#include "hosts/executor.h"
#include "tensor/errors.h"
#include "tensor/packed_operation.h"
#include "tensor/sparse_all_reduce.h"

namespace rota::tensors {
namespace {

[[noreturn]] void refuse(const Call& call, const std::string& what) {
  throw Error(ErrorKind::kValue, join("rota.", call.kind_name(), ": ", what));
}

void check_group_size(const Call& call, const schedule::Hosts& hosts, const OrderOptions& order) {
  if (!order.group_size || hosts.are_groups_of(static_cast<int>(*order.group_size))) return;
  refuse(call, join("group_size is ", *order.group_size,
                    ", but sums over several hosts have the ranks of each host as a group; leave "
                    "it out"));
}

void check_algorithm(const Call& call, std::optional<schedule::Algorithm> algorithm) {
  if (!algorithm) return;
  refuse(call, join("algorithm='", name(*algorithm),
                    "', but the ranks are on several hosts, where sums are hierarchical; leave the "
                    "algorithm to rota (\"auto\")"));
}

}  // namespace

BridgedCollectives::BridgedCollectives(std::unique_ptr<hosts::Bridge> bridge, CpuCollectives& local,
                                       std::optional<WireFormat> inter_wire,
                                       std::function<void()> check_interrupt)
    : rank_(bridge->rank()),
      bridge_(std::move(bridge)),
      local_(local),
      inter_wire_(inter_wire),
      planner_(bridge_->world_size()),
      remote_(*bridge_, check_interrupt),
      queue_(rank_, &bridge_->local(), ProgressQueue::Placement::kAnyCore, check_interrupt) {}

std::string BridgedCollectives::peer_access() const {
  return join("the memory of ", bridge_->hosts().num_hosts(), " hosts and the network");
}

template <typename Body>
WorkRef BridgedCollectives::enqueue(Launch mode, CollectiveKind kind,
                                    std::vector<at::Tensor> results, Body body) {
  const auto work = queue_.enqueue(kind, std::move(results), std::move(body));
  if (mode == Launch::kAsync) return work;
  try {
    work->await_end();
  } catch (...) {
    // Not the call's own error, but a signal's.
    if (!work->isCompleted()) {
      bridge_->abort(join("rank ", rank_, " was interrupted in ", name(kind)));
    }
    throw;
  }
  return {};
}

// Between hosts, what a sum's contributions and results are rounded to.
WireFormat BridgedCollectives::wire_of(const Call& call, bool is_asked_for) const {
  if (is_asked_for) return call.wire;
  const DTypeInfo& dtype = info(call.dtype);
  const bool is_sum = call.op == ReduceOp::kSum || call.op == ReduceOp::kAvg;
  if (inter_wire_ && is_sum && dtype.is_floating &&
      info(inter_wire_->dtype).num_bytes < dtype.num_bytes) {
    return *inter_wire_;
  }
  return {dtype.accumulate};
}

hosts::LevelOrders BridgedCollectives::orders_of(const Call& call) const {
  const schedule::Hosts& hosts = bridge_->hosts();
  if (call.order.num_shards != 0) {
    if (!hosts.are_nodes_of_tree()) {
      refuse(call,
             "order='tree', but the ranks of a host are no subtree of it; give each host as many "
             "consecutive ranks, on a number of hosts that is a power of two, or use order='rank'");
    }
    return {call.order, call.order};
  }
  return {};
}

Call BridgedCollectives::planned(const Operation& operation, at::Device device) const {
  Call call = plan(operation, planner_, rank_, device);
  check_algorithm(call, operation.reduction.algorithm);
  call.algorithm = schedule::Algorithm::kTwoShot;
  if (row_of(call.kind).reduces) {
    call.wire = wire_of(call, operation.wire || operation.reduction.wire);
    check_group_size(call, bridge_->hosts(), operation.reduction.order);
    orders_of(call);
  }
  return call;
}

WorkRef BridgedCollectives::run(OperationList operations, Launch mode) {
  c10::SmallVector<Call, 1> calls;
  for (const Operation& operation : operations) calls.push_back(planned(operation, device()));
  if (operations.empty()) return {};
  check_apart(operations);
  std::vector<OwnedOperation> owned(operations.begin(), operations.end());
  return enqueue(mode, operations[0].kind, results_of(operations),
                 [this, owned = std::move(owned), calls = std::move(calls)] {
                   for (size_t i = 0; i < owned.size(); ++i) {
                     const Operation operation = owned[i].view();
                     check_unchanged(
                         calls[i], [&] { return planned(operation, device()); },
                         [&](const Call& withdrawn) { withdraw(withdrawn, operation.timeout); });
                     run_here(operation, calls[i]);
                   }
                 });
}

void BridgedCollectives::withdraw(const Call& call, OwnTimeout timeout) {
  bridge_->run(call, timeout, [] {});
}

void BridgedCollectives::run_here(const Operation& operation, const Call& call) {
  run_on_cpu(operation, call, rank_, bridge_->world_size(),
             [&](const cpu::Buffers& buffers) { execute(call, buffers, operation.timeout); });
}

void BridgedCollectives::execute(const Call& call, const cpu::Buffers& buffers,
                                 OwnTimeout timeout) {
  hosts::execute({*bridge_, scratch_, call, orders_of(call), buffers, timeout});
}

Call BridgedCollectives::planned(const BucketTensors& tensors, const BucketOptions& options) const {
  Call call = plan(tensors, planner_, options);
  check_algorithm(call, options.algorithm);
  check_group_size(call, bridge_->hosts(), options.order);
  call.algorithm = schedule::Algorithm::kTwoShot;
  orders_of(call);
  return call;
}

WorkRef BridgedCollectives::reduce_bucket(const BucketTensors& tensors,
                                          const BucketOptions& options, Launch mode) {
  const Call call = planned(tensors, options);
  return enqueue(mode, call.kind, {tensors.bucket}, [this, tensors, options, call] {
    check_unchanged(
        call, [&] { return planned(tensors, options); },
        [&](const Call& withdrawn) { withdraw(withdrawn, std::nullopt); });
    run_bucket(tensors, [&](const cpu::Buffers& buffers) { execute(call, buffers, std::nullopt); });
  });
}

WorkRef BridgedCollectives::all_reduce_sparse(const at::Tensor& tensor, Launch mode,
                                              OwnTimeout timeout) {
  check_sparse(tensor);
  return enqueue(mode, CollectiveKind::kAllReduce, {tensor}, [this, tensor, timeout] {
    const Call call{.kind = CollectiveKind::kAllReduce};
    check_unchanged(
        call, [&] { return check_sparse(tensor), call; },
        [&](const Call& withdrawn) { withdraw(withdrawn, timeout); });
    tensors::all_reduce_sparse(tensor, rank_, bridge_->world_size(), [&](Operation& operation) {
      operation.timeout = timeout;
      run_here(operation, planned(operation, device()));
    });
  });
}

WorkRef BridgedCollectives::transfer(Direction direction, const at::Tensor& tensor, int peer,
                                     int64_t tag, Launch mode) {
  const schedule::Hosts& hosts = bridge_->hosts();
  const bool is_of_this_host =
      peer >= 0 && peer < hosts.world_size() && hosts.place_of(peer).host == bridge_->host();
  if (!is_of_this_host) return remote_.start(direction, tensor, peer, tag, mode);
  return local_.transfer(direction, tensor, hosts.place_of(peer).local_rank, tag, mode);
}

void BridgedCollectives::run_in_turn(CollectiveKind kind, std::function<void()> body) {
  enqueue(Launch::kBlocking, kind, {}, std::move(body));
}

void BridgedCollectives::abort(const std::string& reason) {
  if (!is_forked_child()) bridge_->abort(reason);
}

void BridgedCollectives::finish(const std::function<void()>& check_interrupt) {
  if (is_forked_child()) return;
  queue_.finish(check_interrupt);
  remote_.finish_sends();
}

void BridgedCollectives::end_progress() {
  if (!bridge_ || is_forked_child()) return;
  if (queue_.has_unfinished() || remote_.has_unfinished()) {
    bridge_->abort(join("rank ", rank_, " dropped its communicator with work pending"));
  }
  queue_.close();
  remote_.close();
}

void BridgedCollectives::close() {
  end_progress();
  // Its destructor, and that of the engine, would wait for threads.
  if (is_forked_child()) static_cast<void>(bridge_.release());
  bridge_.reset();
}

}  // namespace rota::tensors
