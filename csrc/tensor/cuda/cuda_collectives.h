// Collectives on one rank's CUDA tensors, by rota's own kernels. Only the constructor, the
// destructor and finish() wait for the GPU.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/FunctionRef.h>

#include <chrono>

#include "core/device_monitor.h"
#include "core/joined_regions.h"
#include "cuda/executor.h"
#include "tensor/collectives.h"
#include "tensor/cuda/bucket_memory.h"
#include "tensor/cuda/join_gpus.h"

namespace rota::tensors {

// From one look at whether kernels have ended to the next.
inline constexpr auto kFinishPoll = std::chrono::microseconds(100);

class CudaCollectives final : public Collectives {
 public:
  // `device` must be the current one. Collective; blocks. Throws Error(kTransport) on every rank if
  // the GPUs cannot be joined.
  CudaCollectives(std::shared_ptr<Communicator> communicator,
                  const c10::intrusive_ptr<::c10d::Store>& store, at::Device device,
                  CallerThread thread);
  // Waits for queued work, and aborts it once a kernel has waited long for another rank; then waits
  // for the other ranks to do the same (core/joined_regions.h).
  ~CudaCollectives() override;

  at::Device device() const override { return device_; }
  std::string peer_access() const override { return std::string(regions_->means()); }

  WorkRef run(OperationList operations, Launch mode) override;
  bool supports(const Operation& operation) const override;
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options,
                        Launch mode) override;
  WorkRef transfer(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                   Launch mode) override;
  void finish(const std::function<void()>& check_interrupt) override;
  void check_results(const std::function<void()>& check_interrupt) override;

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  // Queues body() on the current stream or, if asynchronous, on `stream` after the current one.
  WorkRef launch(Launch mode, const c10::Stream& stream, ::c10d::OpType op_type, const char* title,
                 at::TensorList tensors, c10::function_ref<void()> body);
  WorkRef launch(Launch mode, ::c10d::OpType op_type, const char* title, at::TensorList tensors,
                 c10::function_ref<void()> body) {
    return launch(mode, stream_, op_type, title, tensors, body);
  }

  bool have_kernels_ended() const;

  // Queues the call's kernel on the current stream.
  void run(const Call& call, uint64_t fingerprint, void* input, void* output);
  void run(const cuda::LaunchRequest& request);
  void run_planned(const Operation& operation, const Call& call);
  void run_in_place(const Operation& operation, const Call& call);
  void run_reduce_bucket(const BucketTensors& tensors, const Call& call);
  // Packs the tensor into the call's wire format, runs the kernel and unpacks the result. residual,
  // stats: null for none.
  void run_packed(const Call& call, uint64_t fingerprint, void* data, float* residual,
                  double* stats);
  // The packing alone: from `data` to the memory's wire buffer, and from a wire buffer to `data`.
  void launch_pack(const Call& call, const BucketMemory& memory, void* data, float* residual);
  void launch_unpack(const Call& call, const BucketMemory& memory, std::byte* wire, void* data,
                     double* stats);
  void run_all_gather(const Operation& operation, const Call& call);
  // Packs this rank's part into the call's wire format, gathers what is packed and unpacks it all.
  void run_encoded_all_gather(const Operation& operation, const Call& call);
  void run_reduce_scatter(const Operation& operation, const Call& call);
  void run_packed_reduce_scatter(const Call& call, uint64_t fingerprint, void* input, void* output);

  // In cuda_transfers.cpp, as transfer().
  // Whether a collective consists of transfers between pairs of ranks instead of one kernel.
  static bool is_of_transfers(const Call& call);
  void run_transfers(const Operation& operation, const Call& call);
  // `call` is what the two ranks compare.
  void run_transfer(const Call& call, void* data, int source, int destination);

  std::shared_ptr<Communicator> communicator_;
  at::Device device_;
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;          // of asynchronous collectives and sends
  c10::Stream receive_stream_;  // of asynchronous receives, which no send may wait for
  schedule::Tuning tuning_;
  transport::DeviceGeometry geometry_;
  std::unique_ptr<JoinedRegions> regions_;
  Planner planner_;
  // Both exist once the constructor has ended.
  std::optional<cuda::Executor> executor_;
  std::optional<DeviceMonitor> monitor_;
};

}  // namespace rota::tensors
