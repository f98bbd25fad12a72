// The torch.distributed backend "rota": maps c10d's calls to a TensorCommunicator, nothing else.
// Collectives of CUDA tensors for which rota has no kernels go to another backend.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "c10d/options.h"
#include "c10d/window.h"
#include "schedule/direct.h"
#include "tensor/joint_work.h"
#include "tensor/tensor_communicator.h"

namespace rota::c10d_backend {

using namespace tensors;  // NOLINT: the layer below, whose calls these are

using StorePtr = c10::intrusive_ptr<::c10d::Store>;
using WorkPtr = c10::intrusive_ptr<::c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using Operations = c10::SmallVector<Operation, 1>;

class ProcessGroupRota final : public ::c10d::Backend {
 public:
  using OptionsPtr = c10::intrusive_ptr<BackendOptions>;

  // Makes another backend of these ranks, which runs what rota has no kernels for on CUDA tensors,
  // and warns once that it runs `collective`. May throw.
  using MakeDelegate = std::function<BackendPtr(const std::string& collective,
                                                const StorePtr& store, int rank, int world_size)>;

  // How a group whose members may change finds them.
  struct Membership {
    // Describes this process to others.
    std::function<std::string()> handle;
    using Connect = std::function<void(const StorePtr& store, int rank, int world_size,
                                       std::function<void()> check_peers)>;
    // Blocks until the processes with these handles, by rank if they are ordered, have agreed and
    // each has run connect(). Throws on all of them if it does on one.
    std::function<void(int64_t uuid, const std::vector<std::string>& handles, bool are_ordered,
                       std::optional<std::chrono::milliseconds> timeout, const Connect& connect)>
        reconfigure;
  };

  // Arguments as in TensorCommunicator::make(). make_window: for new_window(). membership: of a
  // group without members before its first reconfigure(); rank and world_size are ignored then.
  ProcessGroupRota(const StorePtr& store, int rank, int world_size, OptionsPtr options,
                   MakeDelegate make_delegate, MakeWindow make_window,
                   std::optional<Membership> membership);

  const std::string getBackendName() const override { return "rota"; }

  WorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const ::c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const ::c10d::AllreduceOptions& opts) override;
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
  // As _allgather_base, but each part is rounded to the wire format, on its own rank too.
  WorkPtr all_gather_in(const at::Tensor& output, const at::Tensor& input, const WireFormat& wire,
                        bool is_async);
  // As _reduce_scatter_base, with contributions and sums rounded to the wire dtype once.
  WorkPtr reduce_scatter_in(const at::Tensor& output, const at::Tensor& input,
                            const ::c10d::ReduceOp& op, DType wire_dtype, bool is_async);
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
  // A barrier whose error names every rank that has not come.
  void monitoredBarrier(const ::c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // The works of all calls between the two become one. An error of such a call is thrown by
  // endCoalescing() in its place, since torch's manager has no `finally`; the other calls go on.
  // Other exceptions leave the block, which ends then (BackendOptions::watch_block). A block is its
  // thread's: what other threads call meanwhile is no part of it.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // A group of some of this group's ranks; null on ranks that are not among them.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;

#if defined(C10D_BACKEND_HAS_WINDOW)
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<::c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif

#if defined(C10D_BACKEND_HAS_RECONFIGURE)
  bool supportsReconfigure() const override { return membership_.has_value(); }
  ::c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Blocks. Calls of the members before fail from now on, on all ranks, also if this fails.
  WorkPtr reconfigure(const ::c10d::ReconfigureOptions& opts) override;
#endif

  TensorCommunicator& communicator() { return *communicator_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  // The number of calls that this rank has made.
  void setSequenceNumberForGroup() override {}
  void enableCollectivesTiming() override {}  // works on the CPU always have their duration
  uint64_t getSequenceNumberForGroup() override { return num_calls_; }
  ::c10d::ErrorType getError() override;

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
  ::c10d::Backend& delegate_for(std::string_view collective);
  // The calls between startCoalescing() and endCoalescing().
  struct Block {
    // A CUDA tensor's transfer is not started: all of a block start together, in the order that
    // schedule/direct.h gives them.
    struct Transfer {
      schedule::TransferTurn turn;
      int peer;
      std::function<WorkPtr()> start;
      c10::intrusive_ptr<PromisedWork> work;
    };
    std::vector<Transfer> transfers;
    std::vector<WorkPtr> works;
    std::exception_ptr error;           // the first one
    std::atomic<bool> is_left = false;  // by an exception, as Python finds in whatever thread
  };
  // This thread's; null outside of a block.
  Block* block();
  std::shared_ptr<Block> end_block();

  // Counts a call, and returns the work that issue() returns, which belongs to the block if there
  // is one. All checks of a call are in issue().
  template <typename Issue>
  WorkPtr call(const Issue& issue);
  template <typename Issue>
  WorkPtr call_in(Block& block, Issue& issue);
  WorkPtr transfer(Direction direction, Tensors& tensors, int peer, int tag);
  void start_transfers(Block& block);
  // Runs operations of one kind.
  WorkPtr run_own(OperationList operations, bool is_async);
  // The same with those that make() returns, or c10d's method on the delegate if they are of CUDA
  // tensors that rota has no kernels for. args: of that method; the last are its options.
  template <typename Make, typename Method, typename... Args>
  WorkPtr run(const Make& make, Method on_delegate, Args&... args);
  // c10d expects a Work even from a blocking call. called: when that began.
  WorkPtr work_of(const WorkRef& work, CollectiveKind kind, Tensors results,
                  HostWork::Clock::time_point called) const;

  StorePtr store_;
  OptionsPtr options_;
  std::shared_ptr<TensorCommunicator> communicator_;
  const MakeDelegate make_delegate_;
  BackendPtr delegate_;  // null until it is needed
  const MakeWindow make_window_;
  const std::optional<Membership> membership_;
  int num_windows_ = 0;  // made so far; all ranks count alike
  std::atomic<uint64_t> num_calls_{0};
  std::string last_split_name_;  // unique; a group without a name is not kept
  std::optional<c10::weak_intrusive_ptr<Backend>> last_split_;
  std::mutex blocks_mutex_;
  std::map<std::thread::id, std::shared_ptr<Block>> blocks_;  // guarded by it
  std::atomic<int> num_blocks_{0};  // a thread reads its own changes, which are all that it needs
};

}  // namespace rota::c10d_backend
