#include "core/joined_regions.h"

#include <algorithm>
#include <chrono>

#include "base/fork_generation.h"

namespace rota {
namespace {

using Clock = std::chrono::steady_clock;

// How long a rank waits, in each of the two steps, for live peers that do not come. Ranks mostly
// end together. A peer that never closes its communicator, or closes it later than this, costs each
// of the others one such wait: a peer that missed one step is not awaited in the next.
//
// The region is then freed while that peer still maps it. CUDA's documentation does not define what
// an access does there; the driver counts the processes that map memory shared with
// cudaIpcGetMemHandle, and keeps it until the last one has unmapped it, as it does by design for
// torch's symmetric memory. That is the second line of defence; these steps are the first.
constexpr Nanoseconds kPatience = std::chrono::seconds(2);

// Gives up on a peer that has no kernels left or does not come.
class PeerObserver final : public WaitObserver {
 public:
  PeerObserver(const transport::Transport& transport, int peer, Clock::time_point since)
      : transport_(transport), peer_(peer), since_(since) {}

  // A rank departs only after it has released its regions. One that has failed may never reach
  // close(); its monitor says when its kernels have ended (core/device_monitor.h).
  std::optional<Error> poll() override {
    const transport::ControlBlock& control = transport_.region(peer_).control();
    return give_up(control.departed.load() != 0 || control.kernels_ended.load() != 0);
  }

  // A process that the kernel has begun to end may still have kernels on its GPU.
  std::optional<Error> tick(Nanoseconds) override {
    if (auto gone = poll()) return gone;
    const std::vector<int> ended = transport_.find_ended_peers();
    return give_up(std::find(ended.begin(), ended.end(), peer_) != ended.end() ||
                   Clock::now() - since_ >= kPatience);
  }

 private:
  static std::optional<Error> give_up(bool is_hopeless) {
    if (!is_hopeless) return std::nullopt;
    return Error(ErrorKind::kPeerFailed, "not waited for any longer");
  }

  const transport::Transport& transport_;
  int peer_;
  Clock::time_point since_;
};

}  // namespace

JoinedRegions::JoinedRegions(Communicator& communicator, transport::DeviceRegions regions)
    : communicator_(communicator),
      regions_(std::move(regions)),
      fork_generation_(fork_generation()) {
  for (int peer = 0; peer < communicator.world_size(); ++peer) {
    if (peer != communicator.rank()) awaited_.push_back(peer);
  }
}

JoinedRegions::~JoinedRegions() {
  take_step();
  regions_.mapped.reset();
  take_step();
  regions_.own.reset();
}

// regions_left is a count, because all ranks may join their GPUs again after a failed attempt.
void JoinedRegions::take_step() {
  if (fork_generation_ != fork_generation()) return;
  const transport::Transport& transport = communicator_.transport();
  Flag& own = transport.own_control().regions_left;
  const uint64_t step = own.load() + 1;
  communicator_.waiter().publish(own, step);
  const auto since = Clock::now();
  std::erase_if(awaited_, [&](int peer) {
    PeerObserver observer(transport, peer, since);
    try {
      communicator_.waiter().wait(transport.region(peer).control().regions_left, step, {},
                                  observer);
      return false;
    } catch (const Error&) {
      return true;
    }
  });
}

}  // namespace rota
