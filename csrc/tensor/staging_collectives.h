// Collectives on CUDA tensors when GPUs cannot be joined, a kernel failed its self-test, or nothing
// but the CPU reaches other hosts. Copies through the host's memory and runs the CPU collectives,
// which give the same bits. Every call waits for the GPU.
#pragma once

#include "tensor/collectives.h"

namespace rota::tensors {

class StagingCollectives final : public Collectives {
 public:
  // cpu: of this rank's CPU tensors; outlives this.
  StagingCollectives(Collectives& cpu, int rank, at::Device device)
      : cpu_(cpu), rank_(rank), device_(device) {}

  at::Device device() const override { return device_; }
  std::string peer_access() const override { return cpu_.peer_access(); }

  WorkRef run(OperationList operations, Launch mode) override;
  bool supports(const Operation& operation) const override;
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                        Launch mode) override;
  bool has_transfers() const override { return false; }
  WorkRef transfer(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                   Launch mode) override;
  void finish(const std::function<void()>&) override {}

 private:
  // Throws Error while a graph is being captured.
  void check_not_capturing() const;
  WorkRef done(Launch mode, CollectiveKind kind, std::vector<at::Tensor> results) const;

  Collectives& cpu_;
  int rank_;
  at::Device device_;
};

}  // namespace rota::tensors
