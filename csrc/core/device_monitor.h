// Watches over the kernels of one communicator, which wait for other ranks while no thread of the
// host waits for them: a thread that tells kernels when a rank has failed or died, and the other
// ranks when a kernel has given up. Calls no CUDA, except to ask whether kernels still run.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "core/communicator.h"
#include "core/watch.h"
#include "cuda/peers.h"

namespace rota {

class DeviceMonitor {
 public:
  // What it asks of the rank's executor (cuda/executor.h).
  struct Kernels {
    std::function<std::optional<cuda::Failure>()> failure;
    std::function<void()> abort;
    std::function<bool()> is_idle;
  };

  DeviceMonitor(Communicator& communicator, Kernels kernels);
  // Ends the thread.
  ~DeviceMonitor();
  DeviceMonitor(const DeviceMonitor&) = delete;
  DeviceMonitor& operator=(const DeviceMonitor&) = delete;

 private:
  void run();
  // What has gone wrong on any rank, if anything.
  std::optional<Error> look();
  std::optional<Error> find_departure();
  Error describe(const cuda::Failure& failure) const;

  Communicator& communicator_;
  Kernels kernels_;
  Watch watch_;  // the thread's own
  std::optional<std::chrono::steady_clock::time_point> departed_at_;

  uint64_t fork_generation_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_ending_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace rota
