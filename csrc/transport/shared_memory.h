// Regions shared between the processes of one host: anonymous memory (memfd) whose descriptor is
// handed to each peer over a UNIX socket, sealed, and reserved before it is used.
//
// What that buys over shm_open: nothing has a name in /dev/shm, so nothing leaks when a process is
// killed and nobody else can attach; a peer can neither resize nor write a region that is not its
// own; and a full /dev/shm is an error instead of a SIGBUS in the middle of a step.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "transport/host.h"
#include "transport/store.h"
#include "transport/transport.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// A mapping that unmaps itself.
class Mapping {
 public:
  enum class Access {
    kOwner,
    kPeer,  // the control block, where the flags are, is read-only: a flag has one writer
  };

  Mapping(const UniqueFd& memory, size_t num_bytes, Access access);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;
  ~Mapping();
  std::byte* base() const { return base_; }

 private:
  std::byte* base_;
  size_t num_bytes_;
};

// What a rank holds of a peer.
struct Peer {
  std::shared_ptr<const PeerProcess> process;
  Mapping region;
};

class SharedMemoryTransport final : public Transport {
 public:
  // Collective: every rank of the group calls it with the same store, world_size and geometry.
  // Blocks until all regions are mapped; throws Error(kTransport) when that cannot be, or takes
  // longer than `timeout`. check_interrupt runs several times a second meanwhile and may throw.
  static std::unique_ptr<Transport> connect(Store& store, int rank, int world_size,
                                            const Geometry& geometry,
                                            std::chrono::milliseconds timeout,
                                            const std::function<void()>& check_interrupt);

  void reserve(const Span& span) override;
  std::string describe(int peer) const override;
  std::vector<int> find_dead_peers(int awaited) const override;

 private:
  SharedMemoryTransport(int rank, const Geometry& geometry, std::vector<Peer> peers,
                        bool is_reserved);

  std::vector<Peer> peers_;  // by rank; the own entry maps the own region, writable
  bool is_reserved_;         // the whole region is; it must be, where the kernel cannot do parts
};

}  // namespace rota::transport
