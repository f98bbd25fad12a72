#include "tensor/cuda/bridged_cuda_collectives.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <iostream>

#include "tensor/cuda/copies_over_hosts.h"
#include "tensor/cuda/device_work.h"
#include "tensor/cuda/level_sums.h"
#include "tensor/cuda/sums_over_hosts.h"
#include "tensor/gpus.h"
#include "tensor/packed_operation.h"
#include "tensor/staging_collectives.h"

namespace rota::tensors {
namespace {

constexpr int64_t kProbeBytes = 16;

at::Tensor flat(const at::Tensor& contiguous) { return contiguous.view({-1}); }

}  // namespace

BridgedCudaCollectives::BridgedCudaCollectives(BridgedCollectives& bridged,
                                               std::unique_ptr<CudaCollectives> local,
                                               BackendPtr engine,
                                               std::unique_ptr<Collectives> staging)
    : bridged_(bridged),
      device_(local->device()),
      guard_(at::kCUDA),
      stream_(guard_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true)),
      gpus_(bridged.bridge(), std::move(local), std::move(engine), device_),
      staging_(std::move(staging)) {}

std::string BridgedCudaCollectives::peer_access() const {
  return join("the GPUs of ", gpus_.hosts().num_hosts(), " hosts and a device engine");
}

// Each rank sends its number to the ranks of its rail.
void BridgedCudaCollectives::verify_engine() {
  hosts::Bridge& bridge = bridged_.bridge();
  const std::vector<int> peers = gpus_.is_on_rail() ? gpus_.rail().ascending() : std::vector<int>();
  const auto number_of = [](int rank) { return rank % 251 + 1; };
  const int64_t num_bytes = static_cast<int64_t>(peers.size()) * kProbeBytes;
  const at::Tensor outgoing =
      at::full({num_bytes}, number_of(bridge.rank()), at::kByte).to(device_);
  const at::Tensor incoming = at::full({num_bytes}, 0, at::kByte).to(device_);
  DeviceEngine::Splits splits = gpus_.engine().no_splits();
  for (const int peer : peers) splits[static_cast<size_t>(peer)] = kProbeBytes;
  try {
    gpus_.engine().run_first("connect_device", outgoing, splits, incoming, splits);
  } catch (const Error& error) {
    throw Error(ErrorKind::kTransport, bridge.prefix("connect_device"), error.told());
  }
  const at::Tensor received = incoming.cpu();
  for (size_t i = 0; i < peers.size(); ++i) {
    const at::Tensor part = received.narrow(0, static_cast<int64_t>(i) * kProbeBytes, kProbeBytes);
    if (part.equal(at::full({kProbeBytes}, number_of(peers[i]), at::kByte))) continue;
    throw Error(ErrorKind::kTransport, bridge.prefix("connect_device"),
                join("the engine of rank ", bridge.rank(), " did not deliver what rank ", peers[i],
                     " sent from its GPU by alltoall; pass another engine"));
  }
}

std::optional<Call> BridgedCudaCollectives::on_gpus(Call call) const {
  const bool fits = row_of(call.kind).reduces ? sums_on_gpus(call, gpus_.hosts())
                    : call.kind == CollectiveKind::kAllGather
                        ? call.uneven == 0 && !call.encodes_parts()
                        : call.kind == CollectiveKind::kBroadcast;
  if (!fits) return std::nullopt;
  call.is_between_gpus = true;
  return call;
}

bool BridgedCudaCollectives::supports(const Operation& operation) const {
  return staging_->supports(operation) || on_gpus(bridged_.planned(operation, device_)).has_value();
}

WorkRef BridgedCudaCollectives::launch(Launch mode, CollectiveKind kind,
                                       std::vector<at::Tensor> tensors,
                                       std::function<void()> body) {
  if (is_capturing(device_)) {
    throw Error(ErrorKind::kValue,
                join("rota.", name(kind),
                     ": ranks of several hosts compare their calls on the CPU, which a CUDA graph "
                     "cannot capture; call it outside of the capture"));
  }
  RECORD_USER_SCOPE(row_of(kind).title.data());
  const c10::DeviceGuard on_device(device_);
  const c10::Stream stream = mode == Launch::kBlocking ? guard_.getStream(device_) : stream_;
  if (mode == Launch::kAsync) hand_over(tensors, stream);
  bridged_.run_in_turn(kind, [device = device_, stream, body = std::move(body)] {
    const c10::DeviceGuard on_device(device);
    const c10::StreamGuard on_stream(stream);
    const at::NoGradGuard no_grad;
    body();
  });
  if (mode == Launch::kBlocking) return {};
  return c10::make_intrusive<DeviceWork>(gpus_.local().communicator(), op_type_of(kind),
                                         row_of(kind).title.data(), std::move(tensors), stream);
}

WorkRef BridgedCudaCollectives::run(OperationList operations, Launch mode) {
  if (operations.empty()) return {};
  std::vector<Call> calls;
  std::vector<at::Tensor> tensors;
  for (const Operation& operation : operations) {
    // What only staging refuses is for it to refuse.
    const std::optional<Call> call = on_gpus(bridged_.planned(operation, device_));
    if (!call) return staging_->run(operations, mode);
    calls.push_back(*call);
    for (const at::TensorList side : {operation.outputs, operation.inputs}) {
      tensors.insert(tensors.end(), side.begin(), side.end());
    }
  }
  check_apart(operations);
  std::vector<OwnedOperation> owned(operations.begin(), operations.end());
  return launch(mode, operations[0].kind, std::move(tensors),
                [this, owned = std::move(owned), calls = std::move(calls)] {
                  for (size_t i = 0; i < owned.size(); ++i) {
                    const Operation operation = owned[i].view();
                    bridged_.bridge().run(calls[i], operation.timeout,
                                          [&] { run_here(operation, calls[i]); });
                  }
                });
}

// Ranks other than the root put the sum of a reduce aside.
void BridgedCudaCollectives::run_here(const Operation& operation, const Call& call) {
  const int rank = bridged_.bridge().rank();
  const CollectiveRow& row = row_of(call.kind);
  if (row.is_in_place) {
    const bool contributes = is_among(row.contributors, rank, call.root);
    const bool receives = is_among(row.receivers, rank, call.root);
    const bool is_aside = row.reduces && !receives;
    const at::Tensor tensor = is_aside ? operation.outputs[0].clone() : operation.outputs[0];
    const Packed packed(tensor,
                        contributes ? Packed::Content::kRead : Packed::Content::kOverwritten,
                        operation.premul_factor);
    if (row.reduces) {
      all_reduce_over_hosts(gpus_, call, bridged_.orders_of(call), flat(packed.tensor()));
    } else {
      broadcast_over_hosts(gpus_, call, flat(packed.tensor()).view(at::kByte));
    }
    if (receives) packed.unpack();
    return;
  }
  const PackedOperation packed(operation, rank, bridged_.bridge().world_size());
  const cpu::Buffers buffers = packed.buffers();
  if (call.kind == CollectiveKind::kAllGather) {
    all_gather_over_hosts(gpus_, call, buffers);
  } else {
    reduce_scatter_over_hosts(gpus_, call, bridged_.orders_of(call), buffers,
                              operation.any_tensor().scalar_type());
  }
  packed.unpack();
}

WorkRef BridgedCudaCollectives::reduce_bucket(const BucketTensors& tensors,
                                              const BucketOptions& options, Launch mode) {
  check_tensor(tensors.bucket, "reduce_bucket", device_);
  const std::optional<Call> call = on_gpus(bridged_.planned(tensors, options));
  if (!call) return staging_->reduce_bucket(tensors, options, mode);
  std::vector<at::Tensor> used{tensors.bucket, tensors.stats};
  if (tensors.residual) used.push_back(*tensors.residual);
  return launch(mode, call->kind, std::move(used), [this, tensors, call = *call] {
    bridged_.bridge().run(call, std::nullopt, [&] { run_bucket_here(tensors, call); });
  });
}

void BridgedCudaCollectives::run_bucket_here(const BucketTensors& tensors, const Call& call) {
  const Packed packed(tensors.bucket, Packed::Content::kRead);
  all_reduce_over_hosts(gpus_, call, bridged_.orders_of(call), flat(packed.tensor()),
                        tensors.residual ? tensors.residual->data_ptr<float>() : nullptr,
                        tensors.stats.data_ptr<double>());
  packed.unpack();
}

WorkRef BridgedCudaCollectives::transfer(Direction direction, const at::Tensor& tensor, int peer,
                                         int64_t tag, Launch mode) {
  return staging_->transfer(direction, tensor, peer, tag, mode);
}

void BridgedCudaCollectives::finish(const std::function<void()>& check_interrupt) {
  while (!guard_.queryStream(stream_)) {
    check_interrupt();
    std::this_thread::sleep_for(kFinishPoll);
  }
  gpus_.local().finish(check_interrupt);
}

void BridgedCudaCollectives::check_results(const std::function<void()>& check_interrupt) {
  finish(check_interrupt);
  bridged_.check_usable("check_results");
  gpus_.local().check_results(check_interrupt);
}

namespace {

// The GPUs of this host, joined; null and the reason if that is impossible.
std::unique_ptr<CudaCollectives> join_host(BridgedCollectives& bridged, CpuCollectives& cpu,
                                           const c10::intrusive_ptr<::c10d::Store>& store,
                                           at::Device device, std::string& reason) {
  const int host = bridged.bridge().host();
  try {
    return std::make_unique<CudaCollectives>(
        cpu.communicator(),
        c10::make_intrusive<::c10d::PrefixStore>(join("gpus/host/", host), store), device,
        CallerThread::kProgress);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kTransport) throw;
    reason = error.what();
  }
  return nullptr;
}

}  // namespace

std::unique_ptr<Collectives> connect_gpus_of_hosts(BridgedCollectives& bridged, CpuCollectives& cpu,
                                                   const c10::intrusive_ptr<::c10d::Store>& store,
                                                   at::Device device, const BackendPtr& engine) {
  struct Joined {
    std::unique_ptr<CudaCollectives> local;
    std::string reason;
    std::unique_ptr<Collectives> all;
  };
  const auto joined = std::make_shared<Joined>();
  // What fails inside a call fails on every rank.
  const auto run = [&](int step, const std::function<void()>& body) {
    const Call call{.kind = CollectiveKind::kBarrier,
                    .num_elems = static_cast<uint64_t>(step),
                    .is_between_gpus = true};
    bridged.run_in_turn(call.kind, [&bridged, device, call, body] {
      const c10::DeviceGuard on_device(device);
      bridged.bridge().run(call, std::nullopt, body);
    });
  };
  run(0, [&bridged, &cpu, store, device, joined] {
    if (bridged.bridge().hosts().num_hosts() <= kMaxLocalRanks) {
      joined->local = join_host(bridged, cpu, store, device, joined->reason);
    } else {
      joined->reason = join("rota: there are more than ", kMaxLocalRanks, " hosts");
    }
  });
  // All ranks of all hosts take one way.
  const at::Tensor num_joined = at::full({1}, joined->local ? 1 : 0, at::kLong);
  bridged.run(Operation{.kind = CollectiveKind::kAllReduce,
                        .outputs = num_joined,
                        .reduction = {.op = ReduceOp::kMin}},
              Launch::kBlocking);
  if (num_joined.item<int64_t>() == 0) {
    const std::string reason =
        joined->reason.empty() ? "rota: the GPUs of another host cannot be joined" : joined->reason;
    std::cerr << join(reason, ". Collectives on CUDA tensors of rank ", bridged.bridge().rank(),
                      " go through the host's memory, which is slow\n");
    const c10::DeviceGuard on_device(device);
    joined->local.reset();
    return std::make_unique<StagingCollectives>(bridged, bridged.bridge().rank(), device);
  }
  run(1, [&bridged, device, engine, joined] {
    auto all = std::make_unique<BridgedCudaCollectives>(
        bridged, std::move(joined->local), engine,
        std::make_unique<StagingCollectives>(bridged, bridged.bridge().rank(), device));
    all->verify_engine();
    joined->all = std::move(all);
  });
  return std::move(joined->all);
}

}  // namespace rota::tensors
