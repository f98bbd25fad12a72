// The rendezvous of one host's ranks: each appends a card, its endpoint's address
// (transport/endpoint.h) and its configuration, to one text in the Store. The first rank to use the
// group reads all cards and connects to all others, which need not call anything for it.
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
  // Publishes this rank; does not wait for others. make_memory is as in Endpoint; the memory has
  // the geometry's size. The store must outlive this. Throws Error(kTransport).
  Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry,
            std::function<UniqueFd()> make_memory);

  // Blocks until all ranks are connected and returns them, with an empty entry for this rank. May
  // be called again after Error(kTransport).
  std::vector<std::optional<Peer>> rendezvous(std::chrono::milliseconds timeout,
                                              const std::function<void()>& check_interrupt);

 private:
  std::vector<std::string> read_cards() const;
  // Checks the peer's configuration against this rank's and returns its endpoint's address.
  std::string address_of(int peer, const std::string& card) const;

  Store& store_;
  int rank_;
  int world_size_;
  Geometry geometry_;
  const std::string host_;  // read once: later, descriptors for it may be short
  Endpoint own_;
  const std::string card_;  // unique: it holds the endpoint's token
};

}  // namespace rota::transport
