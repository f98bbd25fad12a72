// The torch.distributed backend "rota": maps c10d's calls to a TensorCommunicator, nothing else.
// Collectives of CUDA tensors for which rota has no kernels go to another backend.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "c10d/delegate.h"
#include "tensor/tensor_communicator.h"

namespace rota::c10d_backend {

using namespace tensors;  // NOLINT: the layer below, whose calls these are

using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
using Tensors = std::vector<at::Tensor>;

class ProcessGroupRota final : public ::c10d::Backend {
 public:
  // Arguments as in TensorCommunicator::make().
  ProcessGroupRota(const StorePtr& store, int rank, int world_size,
                   const TensorCommunicatorOptions& options, Delegate::Make make_delegate);

  const std::string getBackendName() const override { return "rota"; }

  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::ReduceScatterOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const ::c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const ::c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const ::c10d::AllgatherOptions& opts) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const ::c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const ::c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const ::c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& opts) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
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
  bool has_transfers_of(const Tensors& tensors) const;
  // Runs operations of one kind, or what `on_delegate` calls on the delegate if they are of CUDA
  // tensors that rota has no kernels for.
  template <typename OnDelegate>
  WorkPtr run(OperationList operations, bool is_async, const OnDelegate& on_delegate);

  std::shared_ptr<TensorCommunicator> communicator_;
  Delegate delegate_;
};

}  // namespace rota::c10d_backend
