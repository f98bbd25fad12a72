// Runs the kernels of one rank, or of local ranks, on one GPU, one collective after another. Holds
// what kernels need to know of their peers and the words by which kernels and host tell each other
// to give up, and keeps the kernels in order.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/launch.h"
#include "cuda/stream_order.h"

namespace rota::cuda {

// Bytes that one rank sends as packets in one channel (transport/device_layout.h); not yet
// measured.
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

// Words in host memory that the GPU maps.
struct HostWords {
  alignas(64) uint32_t abort;
  alignas(64) uint32_t num_left;
  alignas(64) uint64_t failure;
  alignas(64) uint64_t stall;
};

class Executor {
 public:
  struct Options {
    int rank;                 // this rank, or the first local rank
    int num_local_ranks = 1;  // number of ranks that one launch works for
    schedule::Tuning tuning;
    transport::DeviceGeometry geometry;
    std::vector<std::byte*> regions;  // by rank; must outlive the executor
    // Frees those of this process. Graphs keep it: their kernels read it, though they write to no
    // other rank once the executor is gone.
    std::shared_ptr<void> own_regions;
    std::chrono::nanoseconds stall_after = std::chrono::nanoseconds::max();  // take_stall()
    std::chrono::nanoseconds timeout;
  };
  // Uses the current GPU, as all methods do.
  explicit Executor(const Options& options);
  // When nothing queued is left. A graph that is replayed later leaves NaN for results that are
  // floats, as a launch that gives up does.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Plans a launch for run(). Throws Error(kValue) if the kernel does not take the request.
  ResidentPlan plan(const LaunchRequest& request) const;
  // Queues a collective on `stream`, after all earlier ones, except that sends and receives do not
  // wait for each other, which could deadlock two ranks. Throws Error.
  void run(const ResidentPlan& plan, Stream stream);

  // Whether everything queued has finished. May be called from another thread than run(), also
  // while a stream is being captured.
  bool is_idle() const;

  // Why a kernel has given up, if one has. The rank is unusable then: its links are out of step.
  std::optional<Failure> failure() const;
  // The peer that a kernel has waited for longer than Options::stall_after; reported repeatedly
  // while it waits.
  std::optional<Failure> take_stall();
  // Tells kernels how many ranks have left the group; their stalls say whether they knew
  // (Failure::num_left).
  void set_num_left(int num_left);
  // Makes waiting kernels and later ones return at once.
  void abort();

 private:
  struct HostWordsDeleter {
    void operator()(HostWords* words) const;
  };

  // Whether the two ends of a transfer are different launches. Local ranks send and receive in one
  // launch, as in any collective.
  bool has_transfers() const { return peers_.num_local_ranks == 1 && peers_.world_size() > 1; }

  // What launches refer to, those in graphs too.
  struct Shared {
    std::unique_ptr<HostWords, HostWordsDeleter> words;
    std::shared_ptr<void> own_regions;
    StreamOrder order;  // of collectives and sends
    // Orders collectives and receives, if has_transfers(). It is kept from the first collective on,
    // not from the first receive: that receive would have to wait for everything in `order`,
    // including this rank's sends, and graphs captured before it would not be ordered with receives
    // when replayed beside them.
    std::optional<StreamOrder> receives;
  };

  HostWords& words() const { return *shared_->words; }
  // Has the kernels of graphs wait in vain, before they write to another rank.
  void retire_regions();

  std::shared_ptr<Shared> shared_;
  uint64_t last_capture_ = 0;  // number of the last graph that keeps shared_; 0: none
  Peers peers_{};
  schedule::Tuning tuning_;
};

}  // namespace rota::cuda
