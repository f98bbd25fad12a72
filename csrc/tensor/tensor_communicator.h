// The communicator that takes tensors, for Python and for c10d: hands each call to the
// implementation for the device that its tensors are on. Lower layers know no torch types.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "tensor/cpu_collectives.h"
#include "tensor/hosts/bridged_collectives.h"
#include "tensor/hosts/torch_connections.h"
#include "tensor/torch_store.h"
#include "transport/shared_memory.h"

namespace rota::tensors {

// Connects what carries messages between hosts; collective. Returns null and the reason if it
// cannot.
using ConnectEngine = std::function<std::pair<BackendPtr, std::string>(
    const c10::intrusive_ptr<::c10d::Store>& store)>;
// What a rank wants to carry its messages: a name, which must be the same on every rank; why this
// rank cannot use it, or an empty text; how to connect it; and what carries CUDA tensors, null:
// they go through the host's memory.
using ChooseEngine = std::function<std::tuple<std::string, std::string, ConnectEngine, BackendPtr>(
    int rank, int world_size)>;

struct TensorCommunicatorOptions {
  size_t slot_bytes = 256 << 10;
  // Connect at the first call instead of in make(). That call waits until all ranks have made the
  // group; they need not use it.
  bool connects_at_first_use = false;
  std::function<void()> check_interrupt;
  // Runs several times a second while ranks connect, and when they cannot; throws if one of them is
  // lost: a rank that has not yet published itself is unknown here. Null: only the timeout ends
  // such a wait.
  std::function<void()> check_peers;
  // As in Bootstrap::hosts(), of a rank of this group: who watches its process knows. May be null.
  std::function<std::string(int rank)> why_ended;
  // Called if there are several hosts. Null: ranks on several hosts are refused.
  ChooseEngine choose_engine;
  // As in BridgedCollectives.
  std::optional<WireFormat> inter_wire;
};

class TensorCommunicator {
 public:
  // Called by every rank with the same store. Blocks until all have called it, unless
  // options.connects_at_first_use.
  static std::shared_ptr<TensorCommunicator> make(const c10::intrusive_ptr<::c10d::Store>& store,
                                                  int rank, int world_size,
                                                  std::chrono::milliseconds timeout,
                                                  const TensorCommunicatorOptions& options);
  // Aborts pending work, also on the peers.
  ~TensorCommunicator() { end_progress(); }
  TensorCommunicator(const TensorCommunicator&) = delete;
  TensorCommunicator& operator=(const TensorCommunicator&) = delete;

  // Call before Python finalises: finishes queued work and aborts pending work. Python would kill a
  // progress thread that later asks for the GIL, if only to release a tensor, in the middle of C++
  // frames, and crash the process.
  static void end_progress_of_all();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // As in Collectives, with errors as PythonError.
  WorkRef run(OperationList operations, Launch mode);
  // Whether run() supports it; connects the tensors' device. Inside another collective of this
  // communicator, these and reduce_bucket() throw (core/call_scope.h).
  bool supports(const Operation& operation);
  WorkRef reduce_bucket(const BucketTensors& tensors, const BucketOptions& options, Launch mode);
  // As those of CpuCollectives.
  WorkRef reduce_shards(const ShardedBucketRef& shards, const BucketTensors& tensors,
                        const BucketOptions& options, Launch mode);
  void update_shards(const ShardedBucketRef& shards, const cpu::UpdateSteps& steps);
  // CPU tensors only.
  WorkRef all_reduce_sparse(const at::Tensor& tensor, Launch mode, OwnTimeout timeout);
  // CUDA tensors need joined GPUs, which takes all ranks (connect_device()).
  WorkRef transfer(Direction direction, const at::Tensor& tensor, int peer, int64_t tag,
                   Launch mode);

  // Collective: joins the ranks' GPUs; otherwise the first collective on a CUDA tensor does. All
  // CUDA tensors of this rank must be on this device. Blocks. If GPUs cannot be joined, it warns
  // once and collectives go through the host's memory.
  void connect_device(at::Device device);
  // Each rank's host, by rank; connects the group.
  const schedule::Hosts& hosts();
  // How many consecutive ranks are on each NUMA node, if nodes are a level of sums; otherwise 0.
  // Connects the group.
  int node_size();
  // Whether these ranks are known to be on several hosts: those of a group that has not connected
  // yet are not.
  bool spans_hosts(std::span<const int> ranks) const;
  // How a rank has ended, in a sentence, if it is known to have; otherwise empty. Costs a system
  // call.
  std::string why_ended(int rank) const;
  // How GPUs reach each other; empty before they are joined.
  std::optional<std::string> peer_access() const;
  // Whether transfer() supports CUDA tensors, once GPUs are joined.
  bool has_transfers() const { return !gpu_ || gpu_->has_transfers(); }

  // Blocks until what is queued on the GPU is done, and throws if any of it has failed: later than
  // its call, which has only queued it. Does nothing before GPUs are joined.
  void check_results();

  // Waits for queued work and for peers' kernels (core/joined_regions.h), then leaves the group.
  // Later calls fail. Idempotent. Inside a call of this communicator, such as in a signal handler,
  // it aborts the group instead, which ends that call.
  void close();
  // Throws inside a collective of this communicator, which cannot be replaced meanwhile.
  void check_not_inside(std::string_view call) const;
  // Fails every waiting and later call on every rank.
  void abort(const std::string& reason);
  // What the group has failed of; none if it has not, or was never used.
  std::optional<ErrorKind> failure() const;

  // Applies to later calls on CPU tensors that have no timeout of their own.
  void set_timeout(std::chrono::milliseconds timeout);

 private:
  // Joining GPUs takes all ranks.
  enum class Callers { kAllRanks, kSomeRanks };

  TensorCommunicator(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int world_size,
                     std::chrono::milliseconds timeout, const TensorCommunicatorOptions& options);
  // own_timeout: of the call that needs it; none: the group's.
  void connect(OwnTimeout own_timeout = std::nullopt);
  void make_cpu_collectives(std::unique_ptr<transport::Transport> transport);
  // The part of connect() that differs where ranks are on several hosts.
  void connect_hosts(std::chrono::milliseconds timeout, const std::function<void()>& check);
  void check_one_host(std::string_view call) const;
  // Leaves the group if it was never used. Returns false if it is connected.
  bool leave_unconnected();
  // Connects at the first call. Throws what Communicator::check_usable() throws.
  CpuCollectives& cpu_for(std::string_view call, OwnTimeout own_timeout = std::nullopt);
  void end_progress();
  void drop_gpu();
  // Returns body(cpu) of a call of all ranks. Connects at the first call.
  template <typename Body>
  auto collective(std::string_view call, OwnTimeout own_timeout, const Body& body);
  // Joins the GPUs, in a call of all ranks.
  void join_gpus(CpuCollectives& cpu, at::Device device);
  // The one place that picks an implementation by the tensors' device; joins the GPUs if needed.
  Collectives& collectives_for(CpuCollectives& cpu, const at::Tensor& tensor, std::string_view call,
                               Callers callers = Callers::kAllRanks);

  TorchStore store_;
  int rank_;
  int world_size_;
  TensorCommunicatorOptions options_;
  std::atomic<std::chrono::milliseconds> timeout_;  // any thread may set it, also during connect()
  uint64_t fork_generation_;

  // Recursive, because connect() holds it while it runs callbacks, which may come back: signal
  // handlers, and those of other groups' futures.
  std::recursive_mutex connect_mutex_;
  bool is_connecting_ = false;                                // guarded by it, as the next one
  std::unique_ptr<transport::SharedMemoryRank> unconnected_;  // null once connected
  std::atomic<bool> has_left_{false};                         // before it was connected
  std::atomic<bool> is_connected_{false};
  std::optional<schedule::Hosts> hosts_;         // constant once connected, as the next two
  std::optional<CpuCollectives> cpu_;            // of the ranks of this host
  std::unique_ptr<BridgedCollectives> bridged_;  // null if all ranks are on this host
  BackendPtr device_engine_;  // null if CUDA tensors go through the host's memory between hosts
  std::unique_ptr<Collectives> gpu_;  // null until the first CUDA tensor
};

}  // namespace rota::tensors
