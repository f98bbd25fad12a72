// Several ranks of one process on one GPU, whose kernels are one launch: to try and to measure
// collectives without several GPUs or processes.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/executor.h"
#include "transport/device_regions.h"

namespace rota::tensors {

class LocalGroup {
 public:
  struct Options {
    int world_size;
    at::Device device;
    std::optional<int> num_channels;  // none: the tuning's
    std::chrono::milliseconds timeout;
    std::optional<schedule::Tuning> tuning;  // none: the table's
  };
  // Allocates, and waits for that. Throws Error(kValue), and Error(kTransport) for what the CUDA
  // runtime says.
  explicit LocalGroup(const Options& options);
  // Waits for what is queued.
  ~LocalGroup();

  int world_size() const { return options_.world_size; }
  int num_channels() const { return geometry_.num_channels; }
  at::Device device() const { return options_.device; }

  // Tensors are by rank, contiguous, alike, and on the group's device. What is queued goes onto
  // the current stream. Each throws Error.
  void all_reduce(const std::vector<at::Tensor>& tensors, std::string_view op,
                  std::string_view algorithm, std::optional<int> group_size);
  void reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      std::string_view op);
  void all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  void broadcast(const std::vector<at::Tensor>& tensors, int root);
  // From rank src's tensor to rank dst's; the others' stay as they are.
  void send_recv(int src, int dst, const std::vector<at::Tensor>& tensors);

 private:
  // Throws what has ended the group, if anything has.
  void check_usable(std::string_view collective) const;
  void check_tensors(const std::vector<at::Tensor>& tensors, std::string_view collective) const;
  // Of an all-reduce that names none; num_bytes of each rank's tensor.
  cuda::Kernel choose(uint64_t num_bytes) const;
  // One launch for all ranks, on the current stream.
  void launch(const cuda::LaunchRequest& request);

  Options options_;
  schedule::Tuning tuning_;
  transport::DeviceGeometry geometry_;
  transport::DeviceRegions regions_;
  std::unique_ptr<cuda::Executor> executor_;
};

}  // namespace rota::tensors
