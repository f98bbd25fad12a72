// Sums of several hosts' contributions that lie on one GPU, by the kernel that sums local ranks in
// place: each host is a rank of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>

#include "base/wire_format.h"
#include "cuda/executor.h"
#include "schedule/sum_order.h"
#include "transport/device_regions.h"

namespace rota::tensors {

class HostSums {
 public:
  // device: the current one. Allocates memory and waits for that. num_hosts: 2 to kMaxLocalRanks.
  HostSums(int num_hosts, at::Device device);
  // Waits for queued work.
  ~HostSums();

  // Queues it on the current stream: every contribution becomes the sum, rounded once. They are in
  // the order of the hosts, in the wire format, of whole tiles, and start at multiples of 16 bytes.
  void run(std::span<std::byte* const> contributions, uint64_t num_elems, const WireFormat& wire,
           ReduceOp op, double divisor, const schedule::SumOrder& order);

 private:
  int num_hosts_;
  at::Device device_;
  transport::DeviceRegions regions_;
  std::unique_ptr<cuda::Executor> executor_;
};

}  // namespace rota::tensors
