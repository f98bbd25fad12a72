// The torch.distributed backend "rota": maps c10d's calls to a TensorCommunicator, nothing else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "c10d/delegating_backend.h"
#include "tensor/tensor_communicator.h"

namespace rota::c10d_backend {

using namespace tensors;  // NOLINT: the layer below, whose calls these are

class ProcessGroupRota final : public DelegatingBackend {
 public:
  // Arguments as in TensorCommunicator::make().
  ProcessGroupRota(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int world_size,
                   const TensorCommunicatorOptions& options, MakeDelegate make_delegate);

  const std::string getBackendName() const override { return "rota"; }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>& tensors,
                              const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                              std::vector<at::Tensor>& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  WorkPtr barrier(const ::c10d::BarrierOptions& opts) override;

  // For rota.empty(). CPU only: CPU tensors have no device index.
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return device < 0; }
  at::Tensor allocateTensor(long num_elems, at::TensorOptions options) override;

  // For direct callers of torch's Backend: init_process_group(device_id=...) calls this only on
  // backends that can split.
  void eagerConnectSingleDevice(at::Device device) override {
    communicator_->connect_device(device);
  }
  void shutdown() override;
  void abort() override;

 private:
  bool has_transfers_of(const std::vector<at::Tensor>& tensors) const;
  // c10d expects a Work even from a blocking call.
  WorkPtr done_if_null(WorkRef work, ::c10d::OpType op_type, at::TensorList results);
  static std::vector<AllGatherTensors> zip(const std::vector<std::vector<at::Tensor>>& outputs,
                                           const std::vector<at::Tensor>& inputs);
  WorkPtr gather_all(std::vector<AllGatherTensors> gathers, const ::c10d::AllgatherOptions& opts);

  std::shared_ptr<TensorCommunicator> communicator_;
};

}  // namespace rota::c10d_backend
