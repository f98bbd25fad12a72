// Watches over the kernels of one communicator, which wait for other ranks while no thread of the
// host waits for them: a thread that tells kernels when a rank has failed or died, the other ranks
// when a kernel has given up, and the user for whom one has waited long. While kernels may wait, it
// calls no CUDA, which could hold it up where all depends on it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/fork_safe.h"
#include "core/communicator.h"
#include "core/watch.h"
#include "cuda/peers.h"

namespace rota {

class DeviceMonitor {
 public:
  // What it asks of the rank's executor (cuda/executor.h).
  struct Kernels {
    std::function<std::optional<cuda::Failure>()> failure;
    std::function<std::optional<cuda::Failure>()> take_stall;
    std::function<void(int num_left)> set_num_left;
    std::function<void()> abort;
    std::function<bool()> have_ended;  // may call CUDA
  };

  DeviceMonitor(Communicator& communicator, Kernels kernels);
  // Ends the thread.
  ~DeviceMonitor();

  // Whether a kernel waits that has waited long. From any thread.
  bool is_stalled() const;

 private:
  void run();
  // Once kernels were told to return: tells the other ranks when the last one has, since memory
  // that it writes into may be freed only then (core/joined_regions.h).
  void await_end(std::unique_lock<std::mutex>& lock);
  // What has gone wrong on any rank, if anything. stall: whom a kernel waits for, if for long.
  std::optional<Error> look(const std::optional<cuda::Failure>& stall);
  std::optional<Error> find_departure(const std::optional<cuda::Failure>& stall) const;
  void look_for_leavers();
  void warn_about_stall(const cuda::Failure& stall);
  // "for data of rank 1 (pid 7) in channel 3 (epoch 17, queued, step 0)".
  std::string awaited(const cuda::Failure& failure) const;

  Communicator& communicator_;
  Kernels kernels_;
  Watch watch_;  // the thread's own
  // By rank: the how-manieth rank to leave it was; 0: it has not left.
  std::vector<int> left_as_;
  int num_left_ = 0;
  uint64_t regions_left_;  // when GPUs were joined, on every rank (core/joined_regions.h)
  std::atomic<std::chrono::steady_clock::time_point> stalled_at_{};  // last

  std::mutex mutex_;
  ForkSafe<std::condition_variable> ended_;
  bool is_ending_ = false;  // guarded by mutex_
  ForkSafe<std::thread> thread_;
};

}  // namespace rota
