// Collectives of CUDA tensors where GPUs cannot be joined, or kernels not be trusted: through the
// memory of the host, by the collectives of CPU tensors, whose results have the same bits. Every
// call waits for the GPU.
#pragma once

#include "tensor/device_collectives.h"

namespace rota::tensors {

class TensorCommunicator;

class ThroughHost final : public DeviceCollectives {
 public:
  // host owns this.
  ThroughHost(TensorCommunicator& host, at::Device device) : host_(host), device_(device) {}

  at::Device device() const override { return device_; }
  std::string means() const override { return "the host's memory"; }

  WorkRef all_reduce(at::TensorList tensors, const AllReduceOptions& options, Launch mode) override;
  WorkRef reduce_bucket(const at::Tensor& bucket, const BucketOptions& options,
                        Launch mode) override;
  WorkRef broadcast(at::TensorList tensors, int root, Launch mode) override;
  WorkRef all_gather(const std::vector<AllGatherTensors>& gathers, Launch mode) override;
  bool has_reduce_scatter(at::ScalarType) const override { return false; }
  WorkRef reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                         Launch mode) override;
  bool has_transfers() const override { return false; }
  WorkRef send(const at::Tensor& tensor, int peer, Launch mode) override;
  WorkRef recv(const at::Tensor& tensor, int peer, Launch mode) override;
  void finish(const std::function<void()>&) override {}

 private:
  // Runs body(copies) on the CPU and copies the first num_results back.
  template <typename Body>
  WorkRef run(Launch mode, ::c10d::OpType op_type, std::vector<at::Tensor> tensors,
              size_t num_results, const Body& body);

  TensorCommunicator& host_;
  at::Device device_;
};

}  // namespace rota::tensors
