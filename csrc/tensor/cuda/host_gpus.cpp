#include "tensor/cuda/host_gpus.h"

#include <ATen/ops/empty.h>

#include "transport/gpu_identity.h"

namespace rota::tensors {
namespace {

// Of several hosts' contributions, by the kernel that sums local ranks in place. It uses no slots
// and waits for nobody; the executor asks for both.
LocalRanks make_sums(int num_hosts, at::Device device) {
  const transport::GpuIdentity gpu = transport::identity_of_gpu(device.index());
  schedule::Tuning tuning = *schedule::find_tuning(gpu.name, schedule::Topology::kLocal, num_hosts);
  tuning.slot_bytes = 4096;
  return {device, tuning, cuda::geometry_of(num_hosts, /*num_channels=*/1, tuning),
          std::chrono::seconds(1)};
}

// Bytes of floats as such: a kernel that gives up then leaves NaN.
at::Tensor bytes_of(const at::Tensor& bytes, DType dtype) {
  return has_nan(dtype) ? bytes.view(at::kFloat8_e5m2) : bytes;
}

}  // namespace

RankOfEachHost::RankOfEachHost(std::vector<int> by_host) : ascending_(std::move(by_host)) {
  const std::vector<int> ranks = ascending_;
  std::ranges::sort(ascending_);
  for (const int rank : ranks) {
    positions_.push_back(
        static_cast<size_t>(std::ranges::find(ascending_, rank) - ascending_.begin()));
  }
}

Partnered::Partnered(const hosts::Bridge& bridge) : own_(static_cast<size_t>(bridge.local_rank())) {
  for (int local_rank = 0; local_rank < bridge.local_size(); ++local_rank) {
    const int rank = bridge.hosts().rank_at(bridge.host(), local_rank);
    std::vector<int>& ranks = ranks_.emplace_back(bridge.hosts().whose_partner_is(rank));
    ranks.push_back(rank);
    std::ranges::sort(ranks);
    most_ = std::max(most_, ranks.size());
  }
}

HostGpus::HostGpus(hosts::Bridge& bridge, std::unique_ptr<CudaCollectives> local, BackendPtr engine,
                   at::Device device)
    : bridge_(bridge),
      device_(device),
      words_(bytes(sizeof(cuda::UnpackWords))),
      local_(std::move(local)),
      engine_(bridge, std::move(engine)),
      sums_(make_sums(bridge.hosts().num_hosts(), device)) {}

RankOfEachHost HostGpus::rail() const {
  std::vector<int> ranks;
  for (int host = 0; host < hosts().num_hosts(); ++host) {
    ranks.push_back(hosts().rank_at(host, bridge_.local_rank()));
  }
  return RankOfEachHost(std::move(ranks));
}

RankOfEachHost HostGpus::partners() const {
  std::vector<int> ranks;
  for (int host = 0; host < hosts().num_hosts(); ++host) {
    ranks.push_back(host == bridge_.host() ? bridge_.rank()
                                           : hosts().partner_of(bridge_.rank(), host));
  }
  return RankOfEachHost(std::move(ranks));
}

at::Tensor HostGpus::empty(uint64_t num_elems, at::ScalarType type) const {
  return at::empty({static_cast<int64_t>(num_elems)}, at::TensorOptions(type).device(device_));
}

void HostGpus::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op,
                              const OrderOptions& order) {
  local_->run(Operation{.kind = CollectiveKind::kReduceScatter,
                        .inputs = input,
                        .outputs = output,
                        .reduction = {.op = op, .order = order}},
              Launch::kBlocking);
}

void HostGpus::all_reduce(const at::Tensor& tensor, ReduceOp op, const OrderOptions& order) {
  local_->run(Operation{.kind = CollectiveKind::kAllReduce,
                        .outputs = tensor,
                        .reduction = {.op = op, .order = order}},
              Launch::kBlocking);
}

void HostGpus::all_gather(const at::Tensor& shards, DType dtype) {
  const int64_t shard_elems = shards.numel() / bridge_.local_size();
  const at::Tensor all = bytes_of(shards, dtype);
  const at::Tensor own = all.narrow(0, bridge_.local_rank() * shard_elems, shard_elems);
  local_->run(Operation{.kind = CollectiveKind::kAllGather, .inputs = own, .outputs = all},
              Launch::kBlocking);
}

void HostGpus::broadcast(const at::Tensor& bytes, int local_root, DType dtype) {
  const at::Tensor tensor = bytes_of(bytes, dtype);
  local_->run(Operation{.kind = CollectiveKind::kBroadcast, .outputs = tensor, .root = local_root},
              Launch::kBlocking);
}

void HostGpus::gather_rails(const at::Tensor& shards, DType dtype) {
  if (bridge_.local_size() == 1) return;
  if (are_all_on_rails()) return all_gather(shards, dtype);
  const int64_t shard_elems = shards.numel() / num_rails();
  for (int rail = 0; rail < num_rails(); ++rail) {
    broadcast(shards.narrow(0, rail * shard_elems, shard_elems), rail, dtype);
  }
}

void HostGpus::pack(const cuda::BucketArgs& bucket, DType dtype, const WireFormat& wire,
                    float* residual) const {
  cuda::launch_pack({.bucket = bucket,
                     .residual = residual,
                     .rounding = {},
                     .words = static_cast<cuda::UnpackWords*>(words_.data_ptr())},
                    dtype, wire, current_stream(device_));
}

}  // namespace rota::tensors
