// Collectives on CUDA tensors when GPUs cannot be joined or a kernel failed its self-test. Copies
// through the host's memory and runs the CPU collectives, which give the same bits. Every call
// waits for the GPU.
#pragma once

#include "tensor/cpu_collectives.h"

namespace rota::tensors {

class StagingCollectives final : public Collectives {
 public:
  // cpu outlives this.
  StagingCollectives(CpuCollectives& cpu, at::Device device) : cpu_(cpu), device_(device) {}

  at::Device device() const override { return device_; }
  std::string peer_access() const override { return cpu_.peer_access(); }

  WorkRef all_reduce(at::TensorList tensors, const AllReduceOptions& options, Launch mode) override;
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                        Launch mode) override;
  WorkRef broadcast(at::TensorList tensors, int root, Launch mode) override;
  WorkRef all_gather(std::vector<AllGatherTensors> gathers, Launch mode) override;
  bool has_reduce_scatter(at::ScalarType) const override { return false; }
  WorkRef reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                         Launch mode) override;
  bool has_transfers() const override { return false; }
  WorkRef send(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) override;
  WorkRef recv(const at::Tensor& tensor, int peer, int64_t tag, Launch mode) override;
  void finish(const std::function<void()>&) override {}

 private:
  // Runs body(copies) on the CPU and copies the first num_results back.
  template <typename Body>
  WorkRef run(Launch mode, ::c10d::OpType op_type, std::vector<at::Tensor> tensors,
              size_t num_results, const Body& body);

  CpuCollectives& cpu_;
  at::Device device_;
};

}  // namespace rota::tensors
