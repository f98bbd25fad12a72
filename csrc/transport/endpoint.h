// Exchanges memory descriptors between ranks of one host without a collective call: a peer asks the
// listener of the rank's process (transport/listener.h), sends the descriptor of its memory and
// receives that of the rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/listener.h"
#include "transport/mapping.h"
#include "transport/peer_processes.h"
#include "transport/unique_fd.h"

namespace rota::transport {

// What a rank holds of a peer.
struct Peer {
  std::shared_ptr<const PeerProcess> process;  // the kernel vouches for it
  Mapping region;
};

// A rank that peers can connect to, from construction to destruction.
class Endpoint final : private Exposed {
 public:
  // make_memory: makes this rank's memory when a peer connects or in prepare(), whichever comes
  // first; may run in the listener's thread. Every rank's has num_bytes. Throws Error(kTransport).
  Endpoint(int rank, int world_size, std::function<UniqueFd()> make_memory, size_t num_bytes);
  ~Endpoint();

  // What connect() takes: two words.
  std::string address() const;
  bool has_peer(int peer) const;
  // Makes this rank's memory unless it is there. Call before connect().
  void prepare();
  // Exchanges memory with a peer, unless the peer has done so first. Needs no call on the peer's
  // side. check runs several times a second and may throw. Throws Error(kTransport) if the peer has
  // closed its endpoint or died, or could not be accepted when it connected.
  void connect(int peer, const std::string& peer_address, const std::function<void()>& check);
  // Returns all peers by rank, with an empty entry for this rank. Call once, when all are
  // connected.
  std::vector<std::optional<Peer>> take_peers();

 private:
  // Takes a peer's memory and sends this rank's.
  void answer(UniqueFd& connection, ReceivedHello& received) override;
  // The mutex must be locked.
  void make_memory_once();
  // Maps what a peer has sent: its memory and its heap.
  Peer map(int peer, std::shared_ptr<PeerProcess> process,
           const std::vector<UniqueFd>& descriptors) const;

  const int rank_;
  const size_t num_bytes_;
  const std::function<UniqueFd()> make_memory_;
  const UniqueFd& heap_;  // of this process
  const uint64_t token_;  // names this endpoint in a handshake; known to the group only
  std::shared_ptr<Listener> listener_;
  // Guarded by the listener's mutex, except that memory_ is constant after prepare().
  UniqueFd memory_;
  std::vector<std::optional<Peer>> peers_;  // by rank, as the next one
  std::vector<std::string> refusals_;  // why this rank refused a handshake, until connect() says it
};

}  // namespace rota::transport
