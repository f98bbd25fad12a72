// The collectives of one rank's CUDA tensors on the kernels of this project. Nothing here waits for
// the GPU, but for making one.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/device_monitor.h"
#include "core/joined_regions.h"
#include "cuda/executor.h"
#include "tensor/cuda/join_gpus.h"
#include "tensor/device_collectives.h"

namespace rota::tensors {

class DeviceCommunicator final : public DeviceCollectives {
 public:
  // On `device`, which is the current one. Collective; blocks. through_host does what no kernel can
  // be trusted with. Throws Error(kTransport) on every rank where the GPUs cannot be joined.
  DeviceCommunicator(std::shared_ptr<Communicator> communicator,
                     const c10::intrusive_ptr<::c10d::Store>& store, at::Device device,
                     CallerThread thread, std::unique_ptr<DeviceCollectives> through_host);
  // Waits for what is queued, and aborts it once a kernel has waited long for another rank; then
  // for the other ranks to do so (core/joined_regions.h).
  ~DeviceCommunicator() override;

  at::Device device() const override { return device_; }
  std::string means() const override { return std::string(gpus_.regions->means()); }

  WorkRef all_reduce(at::TensorList tensors, const AllReduceOptions& options, Launch mode) override;
  WorkRef reduce_bucket(const at::Tensor& bucket, const BucketOptions& options,
                        Launch mode) override;
  WorkRef broadcast(at::TensorList tensors, int root, Launch mode) override;
  WorkRef all_gather(const std::vector<AllGatherTensors>& gathers, Launch mode) override;
  bool has_reduce_scatter(at::ScalarType dtype) const override;
  WorkRef reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                         Launch mode) override;
  bool has_transfers() const override;
  WorkRef send(const at::Tensor& tensor, int peer, Launch mode) override;
  WorkRef recv(const at::Tensor& tensor, int peer, Launch mode) override;
  void finish(const std::function<void()>& check_interrupt) override;

 private:
  // Queues body() on the current stream, or on `stream` behind the current one.
  template <typename Body>
  WorkRef launch(Launch mode, const c10::Stream& stream, ::c10d::OpType op_type, const char* title,
                 at::TensorList tensors, const Body& body);
  template <typename Body>
  WorkRef launch(Launch mode, ::c10d::OpType op_type, const char* title, at::TensorList tensors,
                 const Body& body) {
    return launch(mode, stream_, op_type, title, tensors, body);
  }
  // This rank is one of both.
  WorkRef transfer(const at::Tensor& tensor, int source, int destination, Launch mode);

  // What runs if this is requested (none: auto), all of the same bits; none: no kernel can be
  // trusted with it. Throws Error(kValue) where that is so of the one that is requested.
  std::optional<schedule::Algorithm> choose(std::optional<schedule::Algorithm> requested,
                                            const WireFormat& wire, uint64_t num_elems,
                                            std::string_view collective) const;
  // Whether all kernels can be trusted that tensors of this dtype need to travel in this format.
  bool has_format(DType dtype, const WireFormat& wire) const;
  // Queues a kernel on the current stream.
  void run(const cuda::LaunchRequest& request);
  void run_all_reduce(const at::Tensor& tensor, const cpu::AllReduceArgs& plan);
  void run_reduce_bucket(const at::Tensor& bucket, const BucketOptions& options,
                         const cpu::AllReduceArgs& plan);
  // Of a tensor that travels in another format than its own; stats: null where nobody asks.
  void run_in_wire_format(const cpu::AllReduceArgs& args, const cpu::BucketPass& pass,
                          double divisor, double* stats, uint64_t fingerprint);
  void run_all_gather(const AllGatherTensors& gather);

  std::shared_ptr<Communicator> communicator_;
  at::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;          // of asynchronous collectives and sends
  c10::Stream receive_stream_;  // of asynchronous receives, which no send may wait for
  schedule::Tuning tuning_;
  transport::DeviceGeometry geometry_;
  JoinedGpus gpus_;
  std::unique_ptr<DeviceCollectives> through_host_;
  cuda::Executor executor_;
  DeviceMonitor monitor_;
};

}  // namespace rota::tensors
