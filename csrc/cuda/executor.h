// Kernels of one rank, or of local ranks, on one GPU, one collective after the other: what they are
// told of their peers, the words through which they and the host tell each other to give up, and
// their order.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/launch.h"
#include "cuda/stream_order.h"

namespace rota::cuda {

// What one rank sends in packets, in one channel (transport/device_layout.h); not yet measured.
inline constexpr size_t kPacketBytes = 4 << 10;

constexpr transport::DeviceGeometry geometry_of(int world_size, int num_channels,
                                                const schedule::Tuning& tuning) {
  return {.world_size = world_size,
          .num_channels = num_channels,
          .slot_bytes = tuning.slot_bytes,
          .packet_bytes = kPacketBytes};
}

// The longest message of low_latency: half of a packet is data.
constexpr uint64_t most_packet_bytes(const transport::DeviceGeometry& geometry) {
  return static_cast<uint64_t>(geometry.num_channels) * geometry.packet_bytes / 2;
}

// Words in memory of the host that the GPU maps.
struct HostWords {
  alignas(64) uint32_t abort;
  alignas(64) uint64_t failure;
  alignas(64) uint64_t stall;
};

class Executor {
 public:
  struct Options {
    int rank;                 // this rank, or the first of local ones
    int num_local_ranks = 1;  // that one launch works for
    schedule::Tuning tuning;
    transport::DeviceGeometry geometry;
    std::vector<std::byte*> regions;  // by rank; they outlive the executor
    std::chrono::nanoseconds stall_after = std::chrono::nanoseconds::max();  // take_stall()
    std::chrono::nanoseconds timeout;
  };
  // On the current GPU, as every call.
  explicit Executor(const Options& options);

  // What run() takes. Throws Error(kValue) where a kernel does not take the request.
  ResidentPlan plan(const LaunchRequest& request) const;
  // Queues a collective on `stream`, behind every one before; but a send does not wait for
  // receives, nor they for it, which could be each other's. Throws Error.
  void run(const ResidentPlan& plan, Stream stream);

  // Whether all that was queued has ended. Can be asked from another thread than run() is called
  // by, while a stream is captured.
  bool is_idle() const;

  // Why a kernel has given up, if one has. The rank cannot go on then: its links are out of step.
  std::optional<Failure> failure() const;
  // For whom a kernel has waited longer than Options::stall_after; said again while it waits.
  std::optional<Failure> take_stall();
  // Kernels that wait, and those to come, return at once.
  void abort();

 private:
  struct HostWordsDeleter {
    void operator()(HostWords* words) const;
  };

  // Whether one end of a transfer is another launch's. Local ranks send and receive in one, as in
  // any collective.
  bool has_transfers() const { return peers_.num_local_ranks == 1 && peers_.world_size() > 1; }

  std::unique_ptr<HostWords, HostWordsDeleter> words_;
  Peers peers_{};
  schedule::Tuning tuning_;
  StreamOrder order_;  // of collectives and sends
  // Of collectives and receives, where there are transfers. Kept from the first collective on, not
  // from the first receive: that one would have to wait for all of order_, the own sends among it,
  // and graphs captured before it would not know of receives when they are replayed beside them.
  std::optional<StreamOrder> receives_;
};

}  // namespace rota::cuda
