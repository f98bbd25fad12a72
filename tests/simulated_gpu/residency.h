// The room that a device has for blocks. Those that find none start when others end.
#pragma once

#include <condition_variable>
#include <mutex>

namespace simulated_gpu {

class Residency {
 public:
  // room: in threads as launches ask for them, however few a block has here.
  explicit Residency(int room) : room_(room), free_(room) {}

  int room() const { return room_; }
  // Waits until there is so much at once.
  void take(int room) {
    std::unique_lock guard(mutex_);
    changed_.wait(guard, [&] { return free_ >= room; });
    free_ -= room;
  }
  void give_back(int room) {
    const std::lock_guard guard(mutex_);
    free_ += room;
    changed_.notify_all();
  }

 private:
  const int room_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int free_;
};

}  // namespace simulated_gpu
