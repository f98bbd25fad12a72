// How the ranks of one host find each other: addresses through the Store, then each rank sends the
// descriptor of its memory to every other over a UNIX socket.
//
// Nobody waits for an accept: a connection and its first message rest in the listener's backlog, so
// every rank first sends everything and then receives everything, and no order can deadlock.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/host.h"
#include "transport/layout.h"
#include "transport/store.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// What a peer's connection tells: the kernel vouches for the process, the message carries the
// memory.
struct Introduction {
  std::shared_ptr<const PeerProcess> process;
  UniqueFd memory;
};

class Bootstrap {
 public:
  Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry,
            std::chrono::milliseconds timeout, std::function<void()> check_interrupt);

  // Returns one Introduction for each rank; the own one stays empty.
  std::vector<Introduction> exchange(const UniqueFd& own_memory);

 private:
  void claim_rank();
  void publish_card(const std::string& address);
  std::string card_key(int rank) const;
  std::string read_card(int peer);
  std::string address_of(int peer);
  void send_memory(int peer, const std::string& peer_address, const UniqueFd& own_memory);
  std::vector<Introduction> receive_all(const UniqueFd& listener);

  Store& store_;
  int rank_;
  int world_size_;
  int64_t incarnation_ = 0;  // groups that this rank has made over the store, this one included
  Geometry geometry_;
  std::chrono::steady_clock::time_point deadline_;
  std::function<void()> check_interrupt_;
};

}  // namespace rota::transport
