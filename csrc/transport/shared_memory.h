// A transport between the processes of one host: the ranks map each other's memory.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "transport/bootstrap.h"
#include "transport/mapping.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace rota::transport {

class SharedMemoryTransport final : public Transport {
 public:
  // Collective, a SharedMemoryRank that connects at once.
  static std::unique_ptr<Transport> connect(Store& store, int rank, int world_size,
                                            const Geometry& geometry,
                                            std::chrono::milliseconds timeout,
                                            const std::function<void()>& check_interrupt);

  SharedMemoryTransport(int rank, const Geometry& geometry, std::vector<Peer> peers,
                        bool is_reserved);

  void reserve(const Span& span) override;
  std::string describe(int peer) const override;
  std::vector<int> find_dead_peers(int awaited) const override;

 private:
  std::vector<Peer> peers_;  // by rank; the own entry maps the own region, writable
  bool is_reserved_;
};

// A rank whose memory its peers may take, while it has none of theirs yet.
class SharedMemoryRank {
 public:
  // Every rank of the group makes one over the same store, with the same world_size and geometry;
  // waits for none of them. The store must live as long. Throws Error(kTransport).
  SharedMemoryRank(Store& store, int rank, int world_size, const Geometry& geometry);
  // Where it has not connected, it has left the group, for those that have met it.
  ~SharedMemoryRank();

  // Blocks until all regions are mapped; throws Error(kTransport) when that cannot be, or takes
  // longer than `timeout`, and may then be tried again; once it has returned, never more.
  // check_interrupt runs several times a second meanwhile and may throw.
  std::unique_ptr<Transport> connect(std::chrono::milliseconds timeout,
                                     const std::function<void()>& check_interrupt);

 private:
  SharedMemoryRank(Store& store, int rank, int world_size, const Geometry& geometry, OwnMemory own);

  uint64_t fork_generation_;
  int rank_;
  Geometry geometry_;
  std::optional<Mapping> region_;  // empty once connected
  bool is_reserved_;
  Bootstrap bootstrap_;
};

}  // namespace rota::transport
