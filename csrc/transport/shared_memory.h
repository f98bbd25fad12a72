// A transport between the processes of one host: the ranks map each other's memory.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "transport/bootstrap.h"
#include "transport/listener.h"
#include "transport/mapping.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace rota::transport {

class SharedMemoryTransport final : public Transport {
 public:
  SharedMemoryTransport(int rank, const Geometry& geometry, std::vector<Peer> peers,
                        bool is_reserved);

  void reserve(const Span& span) override;
  std::span<const std::byte> heap_of(int peer) const override;
  std::string describe(int peer) const override;
  const LifeWord* life_of(int peer) const override;
  CoreWord* own_core() const override;
  std::vector<int> find_ended_peers() const override;

 private:
  const CoreWord* core_of(int peer) const override;

  std::vector<Peer> peers_;  // by rank; the own entry maps the own region, writable
  bool is_reserved_;
  std::shared_ptr<Listener> listener_;  // holds this process's life; none without peers
};

// A rank that peers can connect to but that has not connected yet. It has no memory before a peer
// connects, or it does.
class SharedMemoryRank {
 public:
  // Does not wait for other ranks, which must use the same store, world_size and geometry. The
  // store must outlive this. Throws Error(kTransport).
  SharedMemoryRank(Store& store, int rank, int world_size, const Geometry& geometry);
  // If it never connected, marks this rank as departed for peers that have mapped its memory.
  ~SharedMemoryRank();

  // For hosts(), before connect(), and group_number().
  Bootstrap& bootstrap() { return *bootstrap_; }

  // Blocks until all regions are mapped. Throws Error(kTransport) if that fails or exceeds
  // `timeout`; the call can then be repeated. check_interrupt runs several times a second and may
  // throw. Must not be called again once it has returned.
  std::unique_ptr<Transport> connect(std::chrono::milliseconds timeout,
                                     const std::function<void()>& check_interrupt);

 private:
  uint64_t fork_generation_;
  int rank_;
  Geometry geometry_;
  std::optional<Mapping> region_;  // empty before there is memory, and once connected
  bool is_reserved_ = false;
  std::optional<Bootstrap> bootstrap_;  // its listener's thread may set the two above
};

}  // namespace rota::transport
