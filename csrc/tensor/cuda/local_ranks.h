// Several ranks of one process on one GPU, which share each launch.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <thread>

#include "cuda/executor.h"
#include "tensor/cuda/native_stream.h"
#include "transport/device_regions.h"

namespace rota::tensors {

class LocalRanks {
 public:
  // device: the current one. Allocates memory and waits for that.
  LocalRanks(at::Device device, const schedule::Tuning& tuning,
             const transport::DeviceGeometry& geometry, std::chrono::nanoseconds timeout)
      : device_(device),
        regions_(transport::allocate_regions(geometry.world_size, geometry.num_bytes())),
        executor_(std::make_unique<cuda::Executor>(
            cuda::Executor::Options{.rank = 0,
                                    .num_local_ranks = geometry.world_size,
                                    .tuning = tuning,
                                    .geometry = geometry,
                                    .regions = regions_.by_rank,
                                    .own_regions = regions_.own,
                                    .timeout = timeout})) {}
  // Waits for queued work.
  ~LocalRanks() {
    try {
      const c10::DeviceGuard on_device(device_);
      while (!executor_->is_idle()) std::this_thread::yield();
      executor_.reset();
      regions_ = {};
    } catch (const std::exception&) {
      // The driver is gone, and with it all that ran.
    }
  }

  // One launch for all ranks, on the current stream.
  void run(const cuda::LaunchRequest& request) {
    const c10::DeviceGuard on_device(device_);
    executor_->run(executor_->plan(request), current_stream(device_));
  }
  std::optional<cuda::Failure> failure() const { return executor_->failure(); }

 private:
  at::Device device_;
  transport::DeviceRegions regions_;
  std::unique_ptr<cuda::Executor> executor_;
};

}  // namespace rota::tensors
