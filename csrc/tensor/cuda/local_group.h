// Several ranks of one process on one GPU, which share each launch: for trying and measuring
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
  // Allocates memory and waits for that. Throws Error(kValue) for bad options, and
  // Error(kTransport) for errors of the CUDA runtime.
  explicit LocalGroup(const Options& options);
  // Waits for queued work.
  ~LocalGroup();

  int world_size() const { return options_.world_size; }
  int num_channels() const { return geometry_.num_channels; }
  at::Device device() const { return options_.device; }

  // Tensors are listed by rank: contiguous, of one length and dtype, on the group's device. Work is
  // queued on the current stream. Each throws Error.
  void all_reduce(const std::vector<at::Tensor>& tensors, std::string_view op,
                  std::string_view algorithm, std::optional<int> group_size,
                  std::string_view order);
  void reduce_scatter(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
                      std::string_view op, std::optional<int> group_size, std::string_view order);
  void all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  void broadcast(const std::vector<at::Tensor>& tensors, int root);
  // Copies rank src's tensor to rank dst's; the others do not change.
  void send_recv(int src, int dst, const std::vector<at::Tensor>& tensors);

 private:
  // Throws if an earlier collective has failed.
  void check_usable(std::string_view collective) const;
  void check_tensors(const std::vector<at::Tensor>& tensors, std::string_view collective) const;
  // The kernel for algorithm "auto". num_bytes: of each rank's tensor.
  cuda::Kernel choose(uint64_t num_bytes) const;
  // The request has its kernel and format. order: "rank", within which there may be groups, or
  // "tree".
  void set_order(cuda::LaunchRequest& request, std::string_view collective,
                 std::optional<int> group_size, std::string_view order) const;
  // One launch for all ranks, on the current stream.
  void launch(const cuda::LaunchRequest& request);

  Options options_;
  schedule::Tuning tuning_;
  transport::DeviceGeometry geometry_;
  transport::DeviceRegions regions_;
  std::unique_ptr<cuda::Executor> executor_;
};

}  // namespace rota::tensors
