#include "transport/bootstrap.h"

#include <poll.h>

#include <exception>
#include <sstream>

#include "base/error.h"

namespace rota::transport {
namespace {

constexpr int kStorePollMs = 2;  // few enough requests for a store on a server

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorKind::kTransport, join("rota: ", what));
}

int checked_rank(int rank, int world_size) {
  if (rank < 0 || rank >= world_size) fail(join("rank ", rank, " is not in [0, ", world_size, ")"));
  return rank;
}

// Claims a rank, so that two processes with the same rank are detected.
class Claim {
 public:
  Claim(Store& store, int rank, int world_size) : store_(store), key_(join("claim/", rank)) {
    if (store_.add(key_, 1) != 1) {
      fail(join("two processes say they are rank ", rank, " of ", world_size,
                "; give each process its own RANK"));
    }
  }
  // Releases the rank, because another group may use the store later.
  ~Claim() {
    try {
      store_.add(key_, -1);
    } catch (const std::exception&) {  // the store is gone
    }
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  Store& store_;
  std::string key_;
};

}  // namespace

Bootstrap::Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry,
                     UniqueFd own_memory)
    : store_(store),
      rank_(checked_rank(rank, world_size)),
      world_size_(world_size),
      geometry_(geometry),
      host_(host_id()),
      own_(rank, world_size, std::move(own_memory), geometry.num_bytes(world_size)),
      incarnation_(store.add(join("made/", rank), 1)) {
  publish_card();
}

std::vector<std::optional<Peer>> Bootstrap::rendezvous(
    std::chrono::milliseconds timeout, const std::function<void()>& check_interrupt) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const auto check = [&](const std::function<bool(int)>& is_missing) {
    check_interrupt();
    if (std::chrono::steady_clock::now() < deadline) return;
    std::string missing;
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == rank_ || !is_missing(peer)) continue;
      missing += join(missing.empty() ? "" : ", ", peer);
    }
    fail(join("rank ", rank_, "/", world_size_, " still waits for rank ", missing,
              " to make this group; has its process ended?"));
  };
  const Claim claim(store_, rank_, world_size_);
  // Reads all cards first: then every rank names the one that differs, before ranks that have read
  // its card give up and close their endpoints.
  std::vector<std::string> addresses(static_cast<size_t>(world_size_));
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const std::string card =
        read_card(peer, [&] { check([this](int rank) { return !store_.has(card_key(rank)); }); });
    addresses[static_cast<size_t>(peer)] = address_of(peer, card);
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    own_.connect(peer, addresses[static_cast<size_t>(peer)],
                 [&] { check([this](int rank) { return !own_.has_peer(rank); }); });
  }
  return own_.take_peers();
}

// One line per rank: address, world size, geometry; the host is the rest of the line.
void Bootstrap::publish_card() {
  store_.set(card_key(rank_),
             join(own_.address(), ' ', world_size_, ' ', geometry_.message_bytes, ' ',
                  geometry_.slot_bytes, ' ', geometry_.link_slot_bytes, ' ', host_));
}

std::string Bootstrap::card_key(int rank) const { return join("card/", incarnation_, '/', rank); }

// Polls instead of waiting in the store, so that a signal can interrupt it.
std::string Bootstrap::read_card(int peer, const std::function<void()>& check) {
  const std::string key = card_key(peer);
  while (!store_.has(key)) {
    check();
    poll(nullptr, 0, kStorePollMs);
  }
  return store_.get(key);
}

std::string Bootstrap::address_of(int peer, const std::string& card) const {
  std::istringstream parts(card);
  std::string name, token, host;
  int world_size = 0;
  Geometry geometry{};
  parts >> name >> token >> world_size >> geometry.message_bytes >> geometry.slot_bytes >>
      geometry.link_slot_bytes;
  std::getline(parts >> std::ws, host);
  if (world_size != world_size_) {
    fail(join("rank ", peer, " has world_size ", world_size, ", this rank ", rank_, " has ",
              world_size_, "; start every rank with the same WORLD_SIZE"));
  }
  if (geometry != geometry_) {
    fail(join("rank ", peer, " has slots of ", geometry.slot_bytes, " bytes, this rank ", rank_,
              " of ", geometry_.slot_bytes, "; give every rank the same slot_bytes"));
  }
  if (host != host_) {
    fail(join("rank ", peer, " is on host ", host, ", rank ", rank_, " on ", host_,
              "; this version connects the ranks of one host: make one group per host, or use "
              "Gloo or NCCL between hosts"));
  }
  return join(name, ' ', token);
}

}  // namespace rota::transport
