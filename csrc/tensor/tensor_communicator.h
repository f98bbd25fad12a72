// The communicator that takes tensors, for Python and for c10d: hands each call to the
// implementation for the device that its tensors are on. Torch types stop in this layer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "tensor/cpu_collectives.h"
#include "tensor/torch_store.h"
#include "transport/shared_memory.h"

namespace rota::tensors {

struct TensorCommunicatorOptions {
  std::chrono::milliseconds timeout;
  size_t slot_bytes = 256 << 10;
  // Otherwise at once. Whoever uses the group first waits until all ranks have made it, whether or
  // not they use it too.
  bool connects_at_first_use = false;
  std::function<void()> check_interrupt;
};

class TensorCommunicator {
 public:
  // Every rank makes one over the same store. Blocks until all have, unless the options say that
  // it connects at its first use.
  static std::shared_ptr<TensorCommunicator> make(const c10::intrusive_ptr<::c10d::Store>& store,
                                                  int rank, int world_size,
                                                  const TensorCommunicatorOptions& options);
  // Aborts what is still pending; peers are told.
  ~TensorCommunicator() { end_progress(); }
  TensorCommunicator(const TensorCommunicator&) = delete;
  TensorCommunicator& operator=(const TensorCommunicator&) = delete;

  // To be called before Python finalises: ends all that is queued, aborting what is pending. A
  // progress thread that asks for the GIL later, if only to release a tensor, is killed by Python
  // in the middle of C++ frames, and takes the process with it.
  static void end_progress_of_all();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // As Collectives says; what is wrong is thrown as PythonError.
  WorkRef all_reduce(at::TensorList tensors, const AllReduceOptions& options, Launch mode);
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options, Launch mode);
  WorkRef broadcast(at::TensorList tensors, int root, Launch mode);
  WorkRef all_gather(std::vector<AllGatherTensors> gathers, Launch mode);
  // CUDA tensors only.
  WorkRef reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                         Launch mode);
  // CUDA tensors only, of ranks whose GPUs are joined: that takes all ranks.
  WorkRef send(const at::Tensor& tensor, int peer, int64_t tag, Launch mode);
  WorkRef recv(const at::Tensor& tensor, int peer, int64_t tag, Launch mode);
  WorkRef barrier(Launch mode);

  // The parts of `output`, one for each rank, that an all-gather of `input` fills.
  AllGatherTensors split_by_rank(const at::Tensor& output, const at::Tensor& input) const;

  // Collective: joins the GPUs of the ranks, which the first collective on a CUDA tensor does
  // otherwise. All CUDA tensors of this rank are to be on this device. Blocks. Where GPUs cannot be
  // joined, it says so once, and collectives go through the host's memory.
  void connect_device(at::Device device);
  // How GPUs reach each other; none before they are joined.
  std::optional<std::string> peer_access() const;
  // Whether send() and recv() will do, as soon as GPUs are joined.
  bool has_transfers() const { return !gpu_ || gpu_->has_transfers(); }
  // Whether reduce_scatter() will do for tensors like this one; connects its device.
  bool has_reduce_scatter(const at::Tensor& input);

  // Waits for what is queued, and for peers' kernels (core/joined_regions.h), then leaves the
  // group; later calls fail. Idempotent.
  void close();
  // Makes every waiting and later call fail on every rank.
  void abort(const std::string& reason);

 private:
  // Joining GPUs takes all ranks.
  enum class Callers { kAllRanks, kSomeRanks };

  TensorCommunicator(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int world_size,
                     const TensorCommunicatorOptions& options);
  void connect();
  // For a group that was never used. False where it is connected.
  bool leave_unconnected();
  // Connects at the first use; throws what Communicator::check_usable() throws.
  CpuCollectives& cpu_for(std::string_view call);
  void end_progress();
  void drop_gpu();
  // The one place where a tensor's device decides who works for it; joins the GPUs when it must.
  Collectives& collectives_for(at::TensorList tensors, std::string_view call,
                               Callers callers = Callers::kAllRanks);

  TorchStore store_;
  int rank_;
  int world_size_;
  TensorCommunicatorOptions options_;
  uint64_t fork_generation_;

  std::mutex connect_mutex_;
  std::unique_ptr<transport::SharedMemoryRank> unconnected_;  // guarded by it; null once connected
  std::atomic<bool> has_left_{false};                         // before it was connected
  std::atomic<bool> is_connected_{false};
  std::optional<CpuCollectives> cpu_;  // constant once connected
  std::unique_ptr<Collectives> gpu_;   // null until CUDA tensors come
};

}  // namespace rota::tensors
