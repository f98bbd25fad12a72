// How processes of one host hand each other memory without meeting: while a rank of a process has
// peers to come, the process listens on a socket, and one thread answers there for all its ranks. A
// peer connects, gives the descriptor of its memory and gets that of the rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/host.h"
#include "transport/mapping.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// What a rank holds of a peer.
struct Peer {
  std::shared_ptr<const PeerProcess> process;  // the kernel vouches for it
  Mapping region;
};

// The listener of a process, and its thread.
class Reception;

// A rank that can be met, from its construction on.
class MeetingRank {
 public:
  // memory: of num_bytes each, this rank's and its peers'. Throws Error(kTransport).
  MeetingRank(int rank, int world_size, UniqueFd memory, size_t num_bytes);
  ~MeetingRank();
  MeetingRank(const MeetingRank&) = delete;
  MeetingRank& operator=(const MeetingRank&) = delete;

  // Where peers meet it: a word and a number.
  std::string address() const;
  bool has_met(int peer) const;
  // Meets the peer at that address, whatever its process does meanwhile; nothing where the peer has
  // come first. check runs several times a second and may throw. Throws Error(kTransport) where the
  // peer is gone.
  void meet(int peer, const std::string& peer_address, const std::function<void()>& check);
  // By rank, all of whom have been met; the own entry is empty. Once.
  std::vector<std::optional<Peer>> take_peers();

 private:
  friend class Reception;

  bool is_awaited(uint64_t peer) const;
  // Takes in what the other side of a connection has sent.
  void welcome(int peer, const UniqueFd& connection, const UniqueFd& memory);
  void call_on(int peer, const std::string& peer_address, const std::function<void()>& check);

  const int rank_;
  const size_t num_bytes_;
  const UniqueFd memory_;
  const uint64_t ticket_;  // by which a connection says whom it is for; a secret of the group
  std::shared_ptr<Reception> reception_;
  std::vector<std::optional<Peer>> peers_;  // by rank; guarded by the reception's mutex
};

}  // namespace rota::transport
