#include "core/device_monitor.h"

#include <iostream>

#include "schedule/ring.h"

namespace rota {
namespace {

// A death must be noticed within 5 ms; a look takes about 10 us.
constexpr auto kLookEvery = std::chrono::milliseconds(2);
// A stalled kernel reports many times within this time; without a report the stall is over.
constexpr auto kStallEndsAfter = std::chrono::milliseconds(500);

std::string_view what_of(cuda::WaitPhase phase) {
  switch (phase) {
    case cuda::WaitPhase::kArrival:
    case cuda::WaitPhase::kPacket:
      return "for data of ";
    case cuda::WaitPhase::kFreeSlot:
      return "for a free slot of ";
  }
  return "for ";
}

}  // namespace

DeviceMonitor::DeviceMonitor(Communicator& communicator, Kernels kernels)
    : communicator_(communicator),
      kernels_(std::move(kernels)),
      watch_(communicator.transport(), communicator.timeout(), nullptr),
      left_as_(static_cast<size_t>(communicator.world_size())),
      regions_left_(communicator.transport().own().control().regions_left.load()),
      thread_([this] { run(); }) {}

DeviceMonitor::~DeviceMonitor() {
  if (thread_.is_of_parent()) return;
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  ended_->notify_all();
  thread_->join();
}

void DeviceMonitor::run() {
  std::unique_lock lock(mutex_);
  int awaited_peer = communicator_.rank();
  while (!ended_->wait_for(lock, kLookEvery, [this] { return is_ending_; })) {
    awaited_peer = schedule::next_rank(awaited_peer, communicator_.world_size());
    watch_.begin_call("collective on the GPU", communicator_.num_posted_launches(), false);
    watch_.begin_wait(awaited_peer, "queued", 0);
    look_for_leavers();
    const std::optional<cuda::Failure> stall = kernels_.take_stall();
    if (const std::optional<Error> error = look(stall)) {
      // Printed at once: kernels return with invalid results, and the next call, which would throw,
      // may come late.
      std::cerr << join(error->what(), "; results of collectives on GPUs since are not valid\n");
      communicator_.fail(*error);
      kernels_.abort();
      return await_end(lock);
    }
    if (stall) warn_about_stall(*stall);
  }
}

void DeviceMonitor::await_end(std::unique_lock<std::mutex>& lock) {
  while (!kernels_.have_ended()) {
    if (ended_->wait_for(lock, kLookEvery, [this] { return is_ending_; })) return;
  }
  communicator_.waiter().publish(communicator_.transport().own_control().kernels_ended, 1);
}

std::optional<Error> DeviceMonitor::look(const std::optional<cuda::Failure>& stall) {
  if (auto error = watch_.poll()) return error;
  if (const auto failure = kernels_.failure()) {
    if (failure->kind == cuda::FailureKind::kTimeout) {
      return Error(ErrorKind::kTimeout,
                   join(watch_.prefix(), " waited ", milliseconds(communicator_.timeout()), " ms ",
                        awaited(*failure), "; is rank ", failure->peer, " alive?"));
    }
    if (failure->kind == cuda::FailureKind::kMismatch) {
      return Error(ErrorKind::kMismatch,
                   join(watch_.prefix(), ": its kernel met that of another collective of ",
                        communicator_.transport().describe(failure->peer), ' ', watch_.place(),
                        "; every rank must replay the same CUDA graphs in the same order, also "
                        "among other collectives"));
    }
  }
  if (auto error = watch_.find_death()) return error;
  return find_departure(stall);
}

void DeviceMonitor::look_for_leavers() {
  for (int peer = 0; peer < communicator_.world_size(); ++peer) {
    const auto& control = communicator_.transport().region(peer).control();
    int& left_as = left_as_[static_cast<size_t>(peer)];
    // A rank that releases its regions launches no more kernels, and may wait for this rank before
    // it departs.
    if (left_as == 0 &&
        (control.departed.load() != 0 || control.regions_left.load() > regions_left_)) {
      left_as = ++num_left_;
      kernels_.set_num_left(num_left_);
    }
  }
}

// A rank that leaves has done its part, but kernels here may not have read all that it sent. So its
// departure is an error only if a kernel that knew of it looked once more and found nothing. When
// the report was written proves nothing: the kernel may have been held up between its look and its
// report, while the data arrived and the peer left.
std::optional<Error> DeviceMonitor::find_departure(
    const std::optional<cuda::Failure>& stall) const {
  if (!stall) return std::nullopt;
  const int left_as = left_as_[stall->peer];
  if (left_as == 0 || stall->num_left < left_as) return std::nullopt;
  return Error(ErrorKind::kPeerFailed,
               join(watch_.prefix(), ": ", communicator_.transport().describe(stall->peer),
                    " has left the group ", watch_.place(),
                    " while a kernel waits; every rank must call the same "
                    "collectives before it closes"));
}

bool DeviceMonitor::is_stalled() const {
  return std::chrono::steady_clock::now() - stalled_at_.load() < kStallEndsAfter;
}

// Warns once per wait.
void DeviceMonitor::warn_about_stall(const cuda::Failure& stall) {
  const bool is_another_wait = !is_stalled();
  stalled_at_ = std::chrono::steady_clock::now();
  if (!is_another_wait) return;
  std::cerr << join(watch_.prefix(), " has waited ", kStallAfter / std::chrono::seconds(1), " s ",
                    awaited(stall), "; still waiting\n");
}

std::string DeviceMonitor::awaited(const cuda::Failure& failure) const {
  return join(what_of(failure.phase), communicator_.transport().describe(failure.peer),
              " in channel ", failure.channel, ' ', watch_.place());
}

}  // namespace rota
