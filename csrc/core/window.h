// One-sided access: each rank of a group reads and writes the others' windows without their help
// (MPI-4.1, chapter 12; passive target). Nothing here is collective, and no failure of one rank
// ends another's window: only the accesses to a closed window fail, and waits for a rank that has
// died.
//
// put and get are plain copies. Accesses that overlap need an order: signal() after them,
// wait_signal() before those of the other rank; whoever has waited for a signal sees all that its
// sender has done before. Only accumulate() is atomic, chunk by chunk.
//
// Works on pointers and dtypes; tensors are handled in tensor/.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/waiter.h"
#include "base/wire_format.h"
#include "transport/host.h"
#include "transport/window_memory.h"

namespace rota {

// What accumulate() adds at once, and what one lock covers.
inline constexpr size_t kWindowChunkBytes = 64 << 10;

// One rank's window and its process.
struct RankWindow {
  transport::WindowView view;
  std::shared_ptr<const transport::PeerProcess> process;  // null: this process
};

class Window {
 public:
  struct Options {
    Nanoseconds timeout;                    // of each wait
    std::function<void()> check_interrupt;  // runs several times a second in a wait; may throw
  };

  // ranks: all windows by rank, each with words for num_channels signals from every rank.
  Window(int rank, std::vector<RankWindow> ranks, int num_channels, Options options);

  int world_size() const { return static_cast<int>(ranks_.size()); }
  static uint64_t num_words(int world_size, int num_channels) {
    return static_cast<uint64_t>(world_size) * static_cast<uint64_t>(num_channels);
  }

  // Each throws Error(kValue) for a rank or a range outside the window, and Error(kPeerFailed) if
  // the target has closed its window or, for accesses that write, has died.

  // Copies to or from the target's elements [offset, offset + num_elems). No wait.
  void put(int target, uint64_t offset, const void* data, uint64_t num_elems, size_t elem_bytes);
  void get(int target, uint64_t offset, void* data, uint64_t num_elems, size_t elem_bytes);

  // Adds to the target's elements, each contribution rounded to `wire` first, if given. Sums are
  // float32, float64 or integer, so that nothing is rounded per call. Ranks that add to one chunk
  // take turns; waits for a rank only while it adds. Of a rank that dies within, a part of its
  // contribution may be in the chunk, which then stays locked.
  void accumulate(int target, uint64_t offset, const void* data, DType dtype, uint64_t num_elems,
                  const std::optional<WireFormat>& wire);

  // Adds one to this rank's signals at the target.
  void signal(int target, int channel);
  // Waits for the next signal of the source that no call has waited for. Throws Error(kTimeout).
  void wait_signal(int source, int channel, std::optional<Nanoseconds> own_timeout);
  // Waits until one of the sources has a signal on the channel that no call has waited for; takes
  // and returns the first such source. Ignores sources that have died or closed, unless all have.
  int wait_any_signal(std::span<const int> sources, int channel,
                      std::optional<Nanoseconds> own_timeout);
  // The signals of the source that no call has waited for.
  uint64_t num_signals(int source, int channel) const;

  // Whether the rank's process runs and its window is open.
  bool is_alive(int rank) const;
  // The rank's memory; fails as get().
  const transport::WindowView& view(int rank) const;

 private:
  class Watch;

  const RankWindow& checked(std::string_view call, int target) const;
  // The target's elements from `offset` on, of which there must be num_elems.
  std::byte* elements(std::string_view call, int target, uint64_t offset, uint64_t num_elems,
                      size_t elem_bytes) const;
  const RankWindow& opened(std::string_view call, int target) const;
  const RankWindow& running(std::string_view call, int target) const;  // and open
  void check_channel(std::string_view call, int channel) const;
  Flag& signals(int target, int source, int channel) const;
  size_t index(int rank, int channel) const {
    return static_cast<size_t>(rank * num_channels_ + channel);
  }

  void lock_chunk(Flag& lock);
  void unlock_chunk(Flag& lock);
  std::string prefix(std::string_view call) const;
  std::string describe(int rank) const;

  const int rank_;
  const std::vector<RankWindow> ranks_;
  const int num_channels_;
  const Options options_;
  const uint64_t fork_generation_;
  Waiter waiter_;
  const WaitPolicy policy_;

  mutable std::mutex mutex_;         // guards the two below
  std::vector<uint64_t> num_sent_;   // by target and channel
  std::vector<uint64_t> num_taken_;  // by source and channel
};

}  // namespace rota
