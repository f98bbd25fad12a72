// The rendezvous of one host's ranks: each publishes its endpoint's address (transport/endpoint.h)
// and its configuration in the Store. The first rank to use the group connects to all others, which
// need not call anything for it.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "transport/endpoint.h"
#include "transport/layout.h"
#include "transport/store.h"

namespace rota::transport {

class Bootstrap {
 public:
  // Publishes this rank; does not wait for others. own_memory has the geometry's size. The store
  // must outlive this. Throws Error(kTransport).
  Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry, UniqueFd own_memory);

  // Blocks until all ranks are connected and returns them, with an empty entry for this rank. May
  // be called again after Error(kTransport).
  std::vector<std::optional<Peer>> rendezvous(std::chrono::milliseconds timeout,
                                              const std::function<void()>& check_interrupt);

 private:
  void publish_card();
  std::string card_key(int rank) const;
  std::string read_card(int peer, const std::function<void()>& check);
  // Checks the peer's configuration against this rank's and returns its endpoint's address.
  std::string address_of(int peer, const std::string& card) const;

  Store& store_;
  int rank_;
  int world_size_;
  Geometry geometry_;
  const std::string host_;  // read once: later, descriptors for it may be short
  Endpoint own_;
  int64_t incarnation_;  // groups that this rank has made over the store, this one included
};

}  // namespace rota::transport
