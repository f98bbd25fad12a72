// How the ranks of one host find each other: each says in the Store where it can be met
// (transport/reception.h) and what it expects of the others, and whoever uses the group first meets
// all. So ranks need not call anything at the same time.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "transport/layout.h"
#include "transport/reception.h"
#include "transport/store.h"

namespace rota::transport {

class Bootstrap {
 public:
  // Peers can meet this rank from then on. own_memory: of the geometry's size. The store must live
  // as long. Throws Error(kTransport).
  Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry, UniqueFd own_memory);

  // Blocks until all ranks have been met, and returns them; the own entry is empty. Throws
  // Error(kTransport), and may then be called again.
  std::vector<std::optional<Peer>> meet_all(std::chrono::milliseconds timeout,
                                            const std::function<void()>& check_interrupt);

 private:
  void publish_card();
  std::string card_key(int rank) const;
  std::string read_card(int peer, const std::function<void()>& check);
  // Where the peer is to be met.
  std::string address_of(int peer, const std::string& card) const;

  Store& store_;
  int rank_;
  int world_size_;
  Geometry geometry_;
  MeetingRank own_;
  int64_t incarnation_;  // groups that this rank has made over the store, this one included
};

}  // namespace rota::transport
