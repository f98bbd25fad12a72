// What collectives of CUDA tensors over several hosts consist of: collectives among the GPUs of
// this host, exchanges with ranks of other hosts, sums of hosts, packing. Everything is queued on
// the current stream of the current device.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "hosts/bridge.h"
#include "tensor/cuda/cuda_collectives.h"
#include "tensor/cuda/local_ranks.h"
#include "tensor/hosts/device_engine.h"

namespace rota::tensors {

// A chunk on its way takes this much memory, once or twice in each of its three steps. Not
// measured: it takes GPUs on two hosts.
inline constexpr uint64_t kDeviceChunkBytes = 32 << 20;

// One rank of each host, of which this rank is one.
class RankOfEachHost {
 public:
  explicit RankOfEachHost(std::vector<int> by_host);

  // In the order in which an exchange lists them.
  const std::vector<int>& ascending() const { return ascending_; }
  // The place of a host's rank in that order.
  size_t position_of(int host) const { return positions_[static_cast<size_t>(host)]; }

 private:
  std::vector<int> ascending_;
  std::vector<size_t> positions_;  // by host
};

// The ranks whose data go through each rank of this host: it and those whose partner it is.
class Partnered {
 public:
  explicit Partnered(const hosts::Bridge& bridge);

  size_t num_local() const { return ranks_.size(); }
  const std::vector<int>& of(size_t local_rank) const { return ranks_[local_rank]; }  // ascending
  const std::vector<int>& own() const { return of(own_); }
  // In a table with as many places for each rank of this host.
  size_t num_places() const { return num_local() * most_; }
  size_t places_of_each() const { return most_; }
  size_t place(size_t local_rank, size_t i) const { return local_rank * most_ + i; }

 private:
  std::vector<std::vector<int>> ranks_;  // by local rank
  size_t own_;
  size_t most_ = 0;
};

class HostGpus {
 public:
  // local: of this host's ranks. engine: of all ranks. The bridge outlives this.
  HostGpus(hosts::Bridge& bridge, std::unique_ptr<CudaCollectives> local, BackendPtr engine,
           at::Device device);

  at::Device device() const { return device_; }
  hosts::Bridge& bridge() { return bridge_; }
  CudaCollectives& local() { return *local_; }
  const schedule::Hosts& hosts() const { return bridge_.hosts(); }
  int num_rails() const { return hosts().num_rails(); }
  // Whether this rank is on a rail, and whether all ranks of its host are.
  bool is_on_rail() const { return bridge_.local_rank() < num_rails(); }
  bool are_all_on_rails() const { return bridge_.local_size() == num_rails(); }
  // The ranks of this rank's rail, and the partners of this rank with itself.
  RankOfEachHost rail() const;
  RankOfEachHost partners() const;

  at::Tensor empty(uint64_t num_elems, at::ScalarType type) const;
  at::Tensor bytes(uint64_t num_bytes) const { return empty(num_bytes, at::kByte); }

  // ---- among the ranks of this host

  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                      const OrderOptions& order);
  void all_reduce(const at::Tensor& tensor, ReduceOp op, const OrderOptions& order);
  // Gathers the bytes of shards, one after another; the own one lies in its place. dtype: what they
  // hold, here and below.
  void all_gather(const at::Tensor& shards, DType dtype);
  void broadcast(const at::Tensor& bytes, int local_root, DType dtype);
  // all_gather() of the rails' shards, also where other ranks of the host have none.
  void gather_rails(const at::Tensor& shards, DType dtype);

  // ---- between hosts

  DeviceEngine& engine() { return engine_; }
  // Sums hosts' contributions that lie on this GPU, each host a rank of its launch: in the wire
  // format, of whole tiles, from multiples of 16 bytes on.
  LocalRanks& sums() { return sums_; }

  // ---- element work

  // dtype: of the bucket's elements. Its wire has room for whole tiles.
  void pack(const cuda::BucketArgs& bucket, DType dtype, const WireFormat& wire,
            float* residual = nullptr) const;
  void copy(void* to, const void* from, uint64_t num_bytes) const {
    cuda::launch_copy(to, from, num_bytes, current_stream(device_));
  }

 private:
  hosts::Bridge& bridge_;
  at::Device device_;
  at::Tensor words_;  // of pack: written only, by what the next members wait for when they go
  std::unique_ptr<CudaCollectives> local_;
  DeviceEngine engine_;
  LocalRanks sums_;
};

}  // namespace rota::tensors
