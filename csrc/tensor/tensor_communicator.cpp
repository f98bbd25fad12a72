#include "tensor/tensor_communicator.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <iostream>

#include "base/per_process.h"
#include "base/timeout.h"
#include "core/call_scope.h"
#include "core/progress_pool.h"
#include "cuda/device_info.h"
#include "hosts/joint_setup.h"
#include "tensor/errors.h"
#include "tensor/gil.h"
#include "tensor/gpus.h"
#include "tensor/staging_collectives.h"

namespace rota::tensors {
namespace {

// Space for one small collective, which then needs one flag and no handshake before it.
constexpr size_t kMessageBytes = 64 << 10;
// Multiples of this hold whole cache lines of every dtype, in shards of any world size.
constexpr size_t kSlotGranuleBytes = 4096;
constexpr size_t kMaxSlotBytes = 1 << 30;

transport::Geometry make_geometry(size_t slot_bytes, int world_size) {
  if (slot_bytes == 0 || slot_bytes % kSlotGranuleBytes != 0 || slot_bytes > kMaxSlotBytes) {
    throw Error(ErrorKind::kValue,
                join("rota.Communicator: slot_bytes is ", slot_bytes, ", expected a multiple of ",
                     kSlotGranuleBytes, " and at most ", kMaxSlotBytes));
  }
  return {.message_bytes = kMessageBytes,
          .slot_bytes = slot_bytes,
          .num_cells = transport::default_num_cells(world_size)};
}

// The most ranks of all hosts; a rank is 16 bits of a Call.
constexpr int kMaxGroupSize = 4096;

void check_local_size(int local_size) {
  if (local_size <= kMaxWorldSize) return;
  throw Error(ErrorKind::kValue, join("rota.Communicator: ", local_size,
                                      " ranks are on this host, expected at most ", kMaxWorldSize));
}

std::string name_of(const std::optional<WireFormat>& wire) {
  if (!wire) return "None";
  return join(name(wire->dtype), wire->is_block_scaled ? " in scaled blocks" : "");
}

struct Living {
  std::mutex mutex;
  std::vector<std::weak_ptr<TensorCommunicator>> communicators;
};

// A forked child has none of its parent's: their ends are the parent's.
Living& all_living() { return per_process<Living>(); }

}  // namespace

std::shared_ptr<TensorCommunicator> TensorCommunicator::make(
    const c10::intrusive_ptr<::c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, const TensorCommunicatorOptions& options) {
  std::shared_ptr<TensorCommunicator> communicator(with_python_errors(
      [&] { return new TensorCommunicator(store, rank, world_size, timeout, options); }));
  if (!options.connects_at_first_use) with_python_errors([&] { communicator->connect(); });
  Living& living = all_living();
  const GilFreeLock lock(living.mutex);
  std::erase_if(living.communicators, [](const auto& weak) { return weak.expired(); });
  living.communicators.push_back(communicator);
  return communicator;
}

TensorCommunicator::TensorCommunicator(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                       int world_size, std::chrono::milliseconds timeout,
                                       const TensorCommunicatorOptions& options)
    : store_(store),
      rank_(rank),
      world_size_(world_size),
      options_(options),
      timeout_(usable_timeout(timeout)),
      fork_generation_(fork_generation()) {
  if (world_size > kMaxGroupSize) {
    throw Error(ErrorKind::kValue, join("rota.Communicator: world_size is ", world_size,
                                        ", expected at most ", kMaxGroupSize));
  }
  unconnected_ = std::make_unique<transport::SharedMemoryRank>(
      store_, rank, world_size, make_geometry(options.slot_bytes, world_size));
}

void TensorCommunicator::connect(OwnTimeout own_timeout) {
  if (fork_generation_ != fork_generation()) {
    throw Error(ErrorKind::kInternal,
                "rota: this communicator belongs to the parent process; make a new one after fork");
  }
  const GilFreeLock lock(connect_mutex_);
  if (is_connected_) return;
  if (is_connecting_) {
    throw Error(ErrorKind::kInternal,
                "rota: a callback or a signal handler uses a group whose first call it has "
                "interrupted; use the group when that call has returned");
  }
  is_connecting_ = true;
  const auto end = c10::make_scope_exit([this] { is_connecting_ = false; });
  const auto check = [this] {
    // A peer may be waiting for a free slot in another group before it makes this one.
    PointToPoint::move_all_groups();
    options_.check_interrupt();
    if (options_.check_peers) options_.check_peers();
    if (has_left_) {
      throw Error(ErrorKind::kInternal, "rota: this communicator is closed; make a new one");
    }
  };
  check();
  const auto timeout = own_timeout.value_or(timeout_);
  try {
    hosts_.emplace(unconnected_->bootstrap().hosts(timeout, check, options_.why_ended));
    if (hosts_->num_hosts() > 1) {
      connect_hosts(timeout, check);
    } else {
      check_local_size(world_size_);
      make_cpu_collectives(unconnected_->connect(timeout, check));
    }
  } catch (const Error& error) {
    // A peer that is lost cannot be reached either; that it is lost is the cause to report.
    if (error.kind() == ErrorKind::kTransport && options_.check_peers) options_.check_peers();
    throw;
  }
  unconnected_.reset();
  is_connected_ = true;
  // set_timeout() may have found the group unconnected since it was made. Both set and look in
  // sequentially consistent order, so one of them sees the other.
  cpu_->communicator()->set_timeout(timeout_.load());
}

void TensorCommunicator::make_cpu_collectives(std::unique_ptr<transport::Transport> transport) {
  cpu_.emplace(std::make_shared<Communicator>(std::move(transport), timeout_.load(),
                                              options_.check_interrupt),
               options_.check_interrupt);
}

void TensorCommunicator::connect_hosts(std::chrono::milliseconds timeout,
                                       const std::function<void()>& check) {
  const auto [host, local_rank] = hosts_->place_of(rank_);
  const int local_size = hosts_->local_size(host);
  const auto prefixed = [&](const std::string& prefix) {
    return c10::make_intrusive<::c10d::PrefixStore>(prefix, store_.store());
  };
  TorchStore store_of_host(prefixed(join("host/", host)));
  TorchStore store_of_group(prefixed(join("engine/", unconnected_->bootstrap().group_number())));
  hosts::JointSetup setup(store_of_group, *hosts_, rank_, timeout, check, options_.why_ended);
  ConnectEngine connect_engine;
  setup.step([&] {
    check_local_size(local_size);
    if (!options_.choose_engine) {
      throw Error(ErrorKind::kTransport,
                  "rota: nothing carries messages between the hosts; pass an engine");
    }
    std::string name, problem;
    std::tie(name, problem, connect_engine, device_engine_) =
        options_.choose_engine(rank_, world_size_);
    if (!problem.empty()) throw Error(ErrorKind::kValue, problem);
    return join("engine=", name, " and inter_wire_dtype=", name_of(options_.inter_wire));
  });
  setup.step([&, host = host, local_rank = local_rank] {
    transport::SharedMemoryRank local(store_of_host, local_rank, local_size,
                                      make_geometry(options_.slot_bytes, local_size));
    try {
      std::unique_ptr<transport::Transport> transport = local.connect(timeout, check);
      transport->set_numbering({hosts_->ranks_of(host), world_size_});
      make_cpu_collectives(std::move(transport));
    } catch (const Error& error) {
      // Which counts the ranks of the host.
      throw Error(error.kind(),
                  join("the ranks of this host cannot share its memory: ", error.what()));
    }
    return std::string();
  });
  const auto connections = [&](const std::string& purpose) {
    const auto [engine, problem] =
        connect_engine(c10::make_intrusive<::c10d::PrefixStore>(purpose, store_of_group.store()));
    if (!engine) throw Error(ErrorKind::kTransport, problem);
    return std::make_shared<TorchConnections>(engine);
  };
  hosts::ConnectionsPtr data, letters;
  setup.step([&] {
    data = connections("data");
    return std::string();
  });
  setup.step([&] {
    letters = connections("letters");
    return std::string();
  });
  // It sends, which may block a peer that still connects.
  std::unique_ptr<hosts::Bridge> bridge;
  setup.step([&] {
    bridge = std::make_unique<hosts::Bridge>(*hosts_, rank_, cpu_->communicator(), std::move(data),
                                             std::move(letters));
    return std::string();
  });
  bridge->expect_signs();
  bridged_ = std::make_unique<BridgedCollectives>(std::move(bridge), *cpu_, options_.inter_wire,
                                                  options_.check_interrupt);
}

const schedule::Hosts& TensorCommunicator::hosts() {
  with_python_errors([&] { cpu_for("hosts"); });
  return *hosts_;
}

int TensorCommunicator::node_size() {
  return with_python_errors([&] {
    const CpuCollectives& cpu = cpu_for("numa_nodes");
    return bridged_ ? 0 : cpu.communicator()->transport().node_size();
  });
}

bool TensorCommunicator::spans_hosts(std::span<const int> ranks) const {
  return is_connected_ && !hosts_->share_host(ranks);
}

std::string TensorCommunicator::why_ended(int rank) const {
  if (!is_connected_ || !cpu_->communicator() || cpu_->communicator()->is_of_parent()) return "";
  const auto ended =
      bridged_ ? bridged_->bridge().ended_ranks() : cpu_->communicator()->ended_ranks();
  const auto found = ended.find(rank);
  return found == ended.end() ? "" : found->second;
}

bool TensorCommunicator::leave_unconnected() {
  if (is_connected_) return false;
  if (fork_generation_ != fork_generation()) return true;  // the parent's
  has_left_ = true;                                        // ends a connect()
  const GilFreeLock lock(connect_mutex_);
  if (!is_connecting_) unconnected_.reset();  // otherwise this is a callback of connect()
  return !is_connected_;
}

CpuCollectives& TensorCommunicator::cpu_for(std::string_view call, OwnTimeout own_timeout) {
  if (!is_connected_) connect(own_timeout);
  cpu_->check_usable(call);
  return *cpu_;
}

void TensorCommunicator::end_progress_of_all() {
  std::vector<std::weak_ptr<TensorCommunicator>> communicators;
  {
    const GilFreeLock lock(all_living().mutex);
    communicators = all_living().communicators;
  }
  // Outside the lock: end_progress() waits for tasks, which may make or drop communicators.
  for (const auto& weak : communicators) {
    if (const auto communicator = weak.lock()) communicator->end_progress();
  }
  // Also those of communicators that callbacks have closed.
  const GilReleased gil_released;
  per_process<ProgressPool>().await_all();
}

void TensorCommunicator::end_progress() {
  const GilReleased gil_released;
  if (leave_unconnected()) return;
  if (bridged_) bridged_->end_progress();
  cpu_->end_progress();
  drop_gpu();
}

// Frees GPU resources with their device current; a forked child has no GPU.
void TensorCommunicator::drop_gpu() {
  c10::OptionalDeviceGuard on_device;
  try {
    if (gpu_) on_device.reset_device(gpu_->device());
  } catch (const c10::Error&) {
  }
  gpu_.reset();
}

template <typename Body>
auto TensorCommunicator::collective(std::string_view call, OwnTimeout own_timeout,
                                    const Body& body) {
  return with_python_errors([&] {
    CpuCollectives& cpu = cpu_for(call, own_timeout);
    const CallScope scope(cpu.communicator().get(), call);
    return body(cpu);
  });
}

Collectives& TensorCommunicator::collectives_for(CpuCollectives& cpu, const at::Tensor& tensor,
                                                 std::string_view call, Callers callers) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    if (bridged_) return *bridged_;
    return cpu;
  }
  if (callers == Callers::kAllRanks || (!gpu_ && world_size_ == 2)) {
    join_gpus(cpu, tensor.device());
  }
  if (!gpu_) {
    throw Error(ErrorKind::kTransport,
                join("rota.", call,
                     ": the GPUs are not joined yet, which takes all ranks; call "
                     "Communicator.connect_device() or any collective of CUDA tensors on each"));
  }
  return *gpu_;
}

void TensorCommunicator::connect_device(at::Device device) {
  collective("connect_device", std::nullopt, [&](CpuCollectives& cpu) { join_gpus(cpu, device); });
}

void TensorCommunicator::join_gpus(CpuCollectives& cpu, at::Device device) {
  if (gpu_ && gpu_->device() == device) return;
  if (!device.is_cuda() || !device.has_index()) {
    throw Error(ErrorKind::kValue, join("rota.connect_device: device is ", device.str(),
                                        ", expected a CUDA device with its index"));
  }
  if (gpu_) {
    throw Error(ErrorKind::kValue,
                join("rota: a tensor is on ", device.str(), ", but this communicator is on ",
                     gpu_->device().str(),
                     "; a rank has one GPU: move the tensor, or make another communicator"));
  }
  if (is_capturing(device)) {
    throw Error(ErrorKind::kValue,
                "rota: a graph is being captured, and the GPUs are not joined yet; call "
                "Communicator.connect_device(device) on every rank before");
  }
  if (bridged_) {
    if (device_engine_) {
      gpu_ = connect_gpus_of_hosts(*bridged_, cpu, store_.store(), device, device_engine_);
    } else {
      gpu_ = std::make_unique<StagingCollectives>(*bridged_, rank_, device);
    }
    return;
  }
  cpu.run_in_turn("rota:connect_device", [this, &cpu, device](CallerThread thread) {
    try {
      gpu_ = connect_gpus(cpu.communicator(), store_.store(), device, thread);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTransport || cuda::archs().empty()) throw;
      std::cerr << join(error.what(), ". Collectives on CUDA tensors of rank ", rank_,
                        " go through the host's memory, which is slow\n");
      gpu_ = std::make_unique<StagingCollectives>(cpu, rank_, device);
    }
  });
}

std::optional<std::string> TensorCommunicator::peer_access() const {
  if (!gpu_) return std::nullopt;
  return gpu_->peer_access();
}

WorkRef TensorCommunicator::run(OperationList operations, Launch mode) {
  if (operations.empty()) return {};
  const Operation& first = operations[0];
  const std::string_view call = name(first.kind);
  return collective(call, first.timeout, [&](CpuCollectives& cpu) {
    return collectives_for(cpu, first.any_tensor(), call).run(operations, mode);
  });
}

bool TensorCommunicator::supports(const Operation& operation) {
  const std::string_view call = name(operation.kind);
  return collective(call, operation.timeout, [&](CpuCollectives& cpu) {
    return collectives_for(cpu, operation.any_tensor(), call).supports(operation);
  });
}

WorkRef TensorCommunicator::reduce_bucket(const BucketTensors& tensors,
                                          const BucketOptions& options, Launch mode) {
  constexpr std::string_view kCall = "reduce_bucket";
  return collective(kCall, std::nullopt, [&](CpuCollectives& cpu) {
    return collectives_for(cpu, tensors.bucket, kCall).reduce_bucket(tensors, options, mode);
  });
}

WorkRef TensorCommunicator::reduce_shards(const ShardedBucketRef& shards,
                                          const BucketTensors& tensors,
                                          const BucketOptions& options, Launch mode) {
  return collective("reduce_shards", std::nullopt, [&](CpuCollectives& cpu) {
    check_one_host("reduce_shards");
    return cpu.reduce_shards(shards, tensors, options, mode);
  });
}

void TensorCommunicator::update_shards(const ShardedBucketRef& shards,
                                       const cpu::UpdateSteps& steps) {
  collective("update_shards", std::nullopt, [&](CpuCollectives& cpu) {
    check_one_host("update_shards");
    cpu.update_shards(shards, steps);
  });
}

void TensorCommunicator::check_one_host(std::string_view call) const {
  if (!bridged_) return;
  throw Error(ErrorKind::kValue, join("rota.", call,
                                      ": the ranks are on several hosts, between "
                                      "which no pieces of buckets travel yet"));
}

WorkRef TensorCommunicator::all_reduce_sparse(const at::Tensor& tensor, Launch mode,
                                              OwnTimeout timeout) {
  return collective("all_reduce", timeout, [&](CpuCollectives& cpu) {
    return bridged_ ? bridged_->all_reduce_sparse(tensor, mode, timeout)
                    : cpu.all_reduce_sparse(tensor, mode, timeout);
  });
}

// CUDA tensors need a turn among the collectives (Communicator::post_transfer()).
WorkRef TensorCommunicator::transfer(Direction direction, const at::Tensor& tensor, int peer,
                                     int64_t tag, Launch mode) {
  const std::string_view call = name(direction);
  const auto run = [&](CpuCollectives& cpu) {
    Collectives& collectives = collectives_for(cpu, tensor, call, Callers::kSomeRanks);
    return collectives.transfer(direction, tensor, peer, tag, mode);
  };
  if (tensor.defined() && tensor.is_cuda()) return collective(call, std::nullopt, run);
  return with_python_errors([&] { return run(cpu_for(call)); });
}

void TensorCommunicator::check_results() {
  if (!gpu_ || !cpu_->communicator()) return;
  with_python_errors([&] { gpu_->check_results(options_.check_interrupt); });
}

void TensorCommunicator::close() {
  with_python_errors([&] {
    if (leave_unconnected() || !cpu_->communicator()) return;
    const void* communicator = cpu_->communicator().get();
    // What is closed is still in use on this thread's stack, and may be awaited in vain.
    if (const CallScope* inside = CallScope::find(communicator)) {
      return abort(join("rank ", rank_, " closed its communicator inside rota.", inside->call()));
    }
    {
      const CallScope scope(communicator, "close", CallScope::Kind::kWait);
      if (bridged_) bridged_->finish(options_.check_interrupt);
      cpu_->finish(options_.check_interrupt);
      if (gpu_) gpu_->finish(options_.check_interrupt);
    }
    drop_gpu();
    if (bridged_) bridged_->close();
    cpu_->close();
  });
}

void TensorCommunicator::abort(const std::string& reason) {
  if (leave_unconnected() || !cpu_->communicator()) return;
  if (bridged_) return bridged_->abort(reason);
  cpu_->communicator()->abort(reason);
}

void TensorCommunicator::check_not_inside(std::string_view call) const {
  if (!is_connected_) return;
  with_python_errors([&] { CallScope::check_not_inside(cpu_->communicator().get(), call); });
}

std::optional<ErrorKind> TensorCommunicator::failure() const {
  if (!is_connected_ || !cpu_->communicator()) return std::nullopt;
  return cpu_->communicator()->failure();
}

void TensorCommunicator::set_timeout(std::chrono::milliseconds timeout) {
  timeout_ = usable_timeout(timeout);
  if (is_connected_ && cpu_->communicator()) cpu_->communicator()->set_timeout(timeout_.load());
}

}  // namespace rota::tensors
