// One-sided access: each rank of a group reads and writes the others' windows without their help
// (MPI-4.1, chapter 12; passive target). Nothing here is collective, and no failure of one rank
// ends another's window: only the accesses to a closed window fail, and waits for a rank that has
// died.
//
// put and get are plain copies. Accesses that overlap need an order: signal() after them,
// wait_signal() before those of the other rank; whoever has waited for a signal sees all that its
// sender has done before. Only accumulate() is atomic, chunk by chunk.
//
// Ranks on other hosts are reached through RemoteRanks, with the same promises; each access then
// waits for the target's answer.
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
#include "base/error.h"
#include "base/waiter.h"
#include "base/wire_format.h"
#include "transport/peer_processes.h"
#include "transport/window_memory.h"

namespace rota {

// What accumulate() adds at once, and what one lock covers.
inline constexpr size_t kWindowChunkBytes = 64 << 10;

// Why a rank on another host has not done what it was asked. The text names the rank; Window
// completes it to an Error.
struct RemoteFailure {
  ErrorKind kind;
  std::string text;
};

// A window's ranks on other hosts, whose memory this process cannot map. hosts/remote_window.h
// implements it by messages.
class RemoteRanks {
 public:
  virtual ~RemoteRanks() = default;

  // Each returns once the target has done it. Callers have checked the range. Waits tick
  // `observer`; throws RemoteFailure or what the observer raises.
  virtual void put(int target, uint64_t first_byte, std::span<const std::byte> data,
                   WaitObserver& observer) = 0;
  virtual void get(int target, uint64_t first_byte, std::span<std::byte> data,
                   WaitObserver& observer) = 0;
  // As Window::accumulate().
  virtual void accumulate(int target, uint64_t offset, const std::byte* data, DType dtype,
                          uint64_t num_elems, const std::optional<WireFormat>& wire,
                          WaitObserver& observer) = 0;
  virtual void signal(int target, int channel, WaitObserver& observer) = 0;
  // Asks the target whether its window is open.
  virtual bool is_open(int target, WaitObserver& observer) = 0;

  // What has happened to the target, as "has closed its window; ..."; none if nothing is known.
  // Returns at once. Waits call it in each tick, so that it can count how long a rank is silent.
  virtual std::optional<std::string> loss_of(int target) = 0;
  // "rank 3 on host 1".
  virtual std::string describe(int target) const = 0;
};

// One rank's window and its process.
struct RankWindow {
  transport::WindowView view;
  std::shared_ptr<const transport::PeerProcess> process;  // null: this process
  bool is_remote = false;  // on another host: of the view only the size of the data is used
};

class Window {
 public:
  struct Options {
    Nanoseconds timeout;                    // of each wait
    std::function<void()> check_interrupt;  // runs several times a second in a wait; may throw
  };

  // ranks: all windows by rank, each with words for num_channels signals from every rank. remote:
  // reaches those on other hosts, if there are any.
  Window(int rank, std::vector<RankWindow> ranks, int num_channels, Options options,
         std::shared_ptr<RemoteRanks> remote = nullptr);

  int world_size() const { return static_cast<int>(ranks_.size()); }
  static uint64_t num_words(int world_size, int num_channels) {
    return static_cast<uint64_t>(world_size) * static_cast<uint64_t>(num_channels);
  }

  // Each throws Error(kValue) for a rank or a range outside the window, and Error(kPeerFailed) if
  // the target has closed its window or, for accesses that write or go to another host, has died.

  // Copies to or from the target's elements [offset, offset + num_elems). No wait on one host.
  void put(int target, uint64_t offset, const void* data, uint64_t num_elems, size_t elem_bytes);
  void get(int target, uint64_t offset, void* data, uint64_t num_elems, size_t elem_bytes);

  // Adds to the target's elements, each contribution rounded to `wire` first, if given. Sums are
  // float32, float64 or integer, so that nothing is rounded per call. Ranks that add to one chunk
  // take turns; waits for a rank only while it adds. If a rank dies within, a part of its
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

  // Whether the rank's process runs and its window is open. Asks a rank on another host.
  bool is_alive(int rank) const;
  // The memory of a rank on this host; fails as get().
  const transport::WindowView& view(int rank) const;

  // ---- what ranks on other hosts ask of this rank's window, in threads that serve them. Each
  // checks everything before it writes, and throws Error(kValue).

  void serve_put(uint64_t first_byte, std::span<const std::byte> data);
  void serve_get(uint64_t first_byte, std::span<std::byte> data) const;
  // data: num_elems contributions in the wire format, if there is one. still_waits runs several
  // times a second while another rank adds to the same chunk.
  void serve_accumulate(uint64_t offset, const std::byte* data, DType dtype, uint64_t num_elems,
                        const std::optional<WireFormat>& wire,
                        const std::function<void()>& still_waits);
  // Only one thread at a time serves a source.
  void serve_signal(int source, int channel);

  // Contributions are rounded in parts of this length, which is a multiple of every block's.
  static constexpr uint64_t kPartElems = kWindowChunkBytes / sizeof(float);

 private:
  class Watch;

  bool is_remote(int rank) const { return ranks_[static_cast<size_t>(rank)].is_remote; }
  // Runs body(observer) and completes its RemoteFailure to an Error.
  template <typename Body>
  auto remotely(std::string_view call, int target, const Body& body) const;
  // As is_alive(), but of ranks on other hosts it is what is known.
  bool is_taken_for_alive(int rank) const;

  const RankWindow& checked(std::string_view call, int target) const;
  // The target's elements from `offset` on, of which there must be num_elems; null on another host.
  std::byte* elements(std::string_view call, int target, uint64_t offset, uint64_t num_elems,
                      size_t elem_bytes) const;
  const RankWindow& opened(std::string_view call, int target) const;
  const RankWindow& running(std::string_view call, int target) const;  // and open
  void check_channel(std::string_view call, int channel) const;
  Flag& signals(int target, int source, int channel) const;
  size_t index(int rank, int channel) const {
    return static_cast<size_t>(rank * num_channels_ + channel);
  }

  // How a thread waits for a lock.
  struct LockWait {
    std::string_view call;  // for errors; empty: a rank on another host asks, which adds its own
    const std::function<void()>& check_interrupt;
  };
  void add_to_chunks(const transport::WindowView& view, uint64_t offset, const std::byte* data,
                     DType dtype, uint64_t num_elems, const LockWait& wait);
  // The same with contributions that lie in a wire format at place_of(begin, num_elems), part by
  // part.
  template <typename PlaceOf>
  void add_parts(const transport::WindowView& view, uint64_t offset, const WireFormat& wire,
                 uint64_t num_elems, const LockWait& wait, const PlaceOf& place_of);
  void lock_chunk(Flag& lock, const LockWait& wait);
  void unlock_chunk(Flag& lock);
  std::string prefix(std::string_view call) const;
  std::string describe(int rank) const;

  const int rank_;
  const std::vector<RankWindow> ranks_;
  const int num_channels_;
  const Options options_;
  const uint64_t fork_generation_;
  const std::shared_ptr<RemoteRanks> remote_;  // null: all ranks are on this host
  Waiter waiter_;
  Waiter server_;  // only publishes, to this rank too: for the threads that serve
  const WaitPolicy policy_;

  mutable std::mutex mutex_;         // guards the two below
  std::vector<uint64_t> num_sent_;   // by target and channel
  std::vector<uint64_t> num_taken_;  // by source and channel
};

}  // namespace rota
