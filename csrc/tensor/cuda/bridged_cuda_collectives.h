// Collectives on one rank's CUDA tensors in a group over several hosts: the kernels of
// CudaCollectives among the GPUs of a host, and a device engine between hosts. The ranks of all
// hosts compare their calls first, on the CPU, which blocks the caller until all have made theirs;
// then everything is queued on a stream. What has no kernel goes through the host's memory.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensor/collectives.h"
#include "tensor/cuda/host_gpus.h"
#include "tensor/hosts/bridged_collectives.h"

namespace rota::tensors {

class BridgedCudaCollectives final : public Collectives {
 public:
  // local: of this host's ranks. staging: for calls that have no kernels. bridged outlives this,
  // and has ended its progress before this is destroyed.
  BridgedCudaCollectives(BridgedCollectives& bridged, std::unique_ptr<CudaCollectives> local,
                         BackendPtr engine, std::unique_ptr<Collectives> staging);

  // Checks that the engine carries what ranks of other hosts send. For every rank, inside a call;
  // blocks. Throws Error(kTransport).
  void verify_engine();

  at::Device device() const override { return device_; }
  std::string peer_access() const override;

  WorkRef run(OperationList operations, Launch mode) override;
  bool supports(const Operation& operation) const override;
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                        Launch mode) override;
  bool has_transfers() const override { return false; }
  WorkRef transfer(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                   Launch mode) override;
  void finish(const std::function<void()>& check_interrupt) override;
  void check_results(const std::function<void()>& check_interrupt) override;

 private:
  // What ranks compare; none if the call goes through the host's memory, on all ranks. Throws
  // Error.
  std::optional<Call> on_gpus(Call call) const;
  // Queues body(), which is run in turn, on the current stream or, if asynchronous, on stream_
  // after the current one.
  WorkRef launch(Launch mode, CollectiveKind kind, std::vector<at::Tensor> tensors,
                 std::function<void()> body);
  void run_here(const Operation& operation, const Call& call);
  void run_bucket_here(const BucketTensors& tensors, const Call& call);

  BridgedCollectives& bridged_;
  at::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;  // of asynchronous calls
  HostGpus gpus_;
  std::unique_ptr<Collectives> staging_;
};

}  // namespace rota::tensors
