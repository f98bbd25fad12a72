// The rendezvous of one host's ranks: each appends a card, its endpoint's address
// (transport/endpoint.h) and its configuration, to one text in the Store. The first rank to use the
// group reads all cards and connects to all others, which need not call anything for it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/endpoint.h"
#include "transport/layout.h"
#include "transport/place.h"
#include "transport/store.h"

namespace rota::transport {

class Bootstrap {
 public:
  // Publishes this rank; does not wait for others. make_memory is as in Endpoint; the memory has
  // the geometry's size. The store must outlive this. Throws Error(kTransport).
  Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry,
            std::function<UniqueFd()> make_memory);
  ~Bootstrap();

  // Blocks until all ranks have published themselves, and returns each one's host_id(). May be
  // called again after Error(kTransport), as the next one.
  // why_ended: says how a rank has ended, if it is known to have; otherwise an empty text. Throws
  // Error(kPeerFailed) for one that has ended without a card.
  using WhyEnded = std::function<std::string(int rank)>;
  std::vector<std::string> hosts(std::chrono::milliseconds timeout,
                                 const std::function<void()>& check_interrupt,
                                 const WhyEnded& why_ended = {});

  // Once all cards are read, of ranks on one host: how many consecutive ranks are on each of
  // several NUMA nodes; 0 if they are not as many, or not consecutive, or some are on no node.
  int node_size() const;

  // Once all cards are read: how many groups this rank has made over the store before this one; the
  // same on every rank.
  size_t group_number() const { return group_number_; }

  // Blocks until all ranks, which must be on one host, are connected and returns them, with an
  // empty entry for this rank.
  std::vector<std::optional<Peer>> rendezvous(std::chrono::milliseconds timeout,
                                              const std::function<void()>& check_interrupt);

 private:
  // Of a rank, so that two processes with the same rank are detected.
  class Claim;
  using IsMissing = std::function<bool(int rank)>;
  struct Card {
    std::string address;  // of the endpoint; empty: the rank has not made this group yet
    std::string host;
    NumaNode node;
  };

  // Reads all ranks' cards into cards_, once. check is called while some are missing.
  void read_all_cards(const std::function<void(const IsMissing&)>& check,
                      const WhyEnded& why_ended = {});
  std::vector<std::string> read_lines();
  // Checks the peer's configuration against this rank's.
  Card parse(int peer, const std::string& line) const;
  // Throws if a host's ranks have set their nodes by hand, but not all of them.
  static void check_nodes(const std::vector<Card>& cards);
  // What a wait for other ranks calls: throws after the timeout, and what check_interrupt throws.
  std::function<void(const IsMissing&)> make_check(
      std::chrono::milliseconds timeout, const std::function<void()>& check_interrupt) const;

  Store& store_;
  int rank_;
  int world_size_;
  Geometry geometry_;
  const std::string host_;  // read once: later, descriptors for it may be short
  Endpoint own_;
  const std::string line_;   // unique: it holds the endpoint's token
  std::vector<Card> cards_;  // by rank; empty before all are there
  size_t group_number_ = 0;
  std::unique_ptr<Claim> claim_;  // between hosts() and rendezvous()
};

}  // namespace rota::transport
