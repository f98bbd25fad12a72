#include "transport/bootstrap.h"

#include <poll.h>

#include <algorithm>
#include <exception>
#include <sstream>

#include "base/error.h"

namespace rota::transport {
namespace {

constexpr const char* kCardsKey = "cards";
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

// A card is one line: rank, address, world size, geometry; the host is the rest of the line.
Bootstrap::Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry,
                     std::function<UniqueFd()> make_memory)
    : store_(store),
      rank_(checked_rank(rank, world_size)),
      world_size_(world_size),
      geometry_(geometry),
      host_(host_id()),
      own_(rank, world_size, std::move(make_memory), geometry.num_bytes(world_size)),
      card_(join(rank, ' ', own_.address(), ' ', world_size, ' ', geometry.message_bytes, ' ',
                 geometry.slot_bytes, ' ', geometry.envelope_bytes, ' ', geometry.ring_bytes, ' ',
                 host_)) {
  store.append(kCardsKey, card_ + '\n');
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
  own_.prepare();
  // Reads all cards first: then every rank names the one that differs, before ranks that have read
  // its card give up and close their endpoints. Polls instead of waiting in the store, so that a
  // signal can interrupt it.
  std::vector<std::string> addresses(static_cast<size_t>(world_size_));
  const auto is_unknown = [&](int peer) { return addresses[static_cast<size_t>(peer)].empty(); };
  while (true) {
    const std::vector<std::string> cards = read_cards();
    for (int rank = 0; rank < world_size_; ++rank) {
      const std::string& card = cards[static_cast<size_t>(rank)];
      if (!card.empty()) addresses[static_cast<size_t>(rank)] = address_of(rank, card);
    }
    if (std::ranges::none_of(addresses, &std::string::empty)) break;
    check(is_unknown);
    poll(nullptr, 0, kStorePollMs);
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    own_.connect(peer, addresses[static_cast<size_t>(peer)],
                 [&] { check([this](int rank) { return !own_.has_peer(rank); }); });
  }
  return own_.take_peers();
}

// The cards of this group by rank, empty for a rank that has not made it yet. Groups that the ranks
// make one after the other over one store are told apart by counting: each rank's n-th card is of
// the n-th group.
std::vector<std::string> Bootstrap::read_cards() const {
  std::vector<std::vector<std::string>> cards_of(static_cast<size_t>(world_size_));
  std::istringstream text(store_.get(kCardsKey));
  for (std::string card; std::getline(text, card);) {
    size_t rank = 0;
    std::istringstream(card) >> rank;
    if (rank < cards_of.size()) cards_of[rank].push_back(card);
  }
  const std::vector<std::string>& own = cards_of[static_cast<size_t>(rank_)];
  const auto number = static_cast<size_t>(std::ranges::find(own, card_) - own.begin());
  std::vector<std::string> cards;
  for (const std::vector<std::string>& of_rank : cards_of) {
    cards.push_back(number < of_rank.size() ? of_rank[number] : "");
  }
  return cards;
}

std::string Bootstrap::address_of(int peer, const std::string& card) const {
  std::istringstream parts(card);
  std::string rank, name, token, host;
  int world_size = 0;
  Geometry geometry{};
  parts >> rank >> name >> token >> world_size >> geometry.message_bytes >> geometry.slot_bytes >>
      geometry.envelope_bytes >> geometry.ring_bytes;
  std::getline(parts >> std::ws, host);
  if (world_size != world_size_) {
    fail(join("rank ", peer, " has world_size ", world_size, ", this rank ", rank_, " has ",
              world_size_, "; start every rank with the same WORLD_SIZE"));
  }
  if (geometry.slot_bytes != geometry_.slot_bytes) {
    fail(join("rank ", peer, " has slots of ", geometry.slot_bytes, " bytes, this rank ", rank_,
              " of ", geometry_.slot_bytes, "; give every rank the same slot_bytes"));
  }
  if (geometry != geometry_) {
    fail(
        join("rank ", peer, " and rank ", rank_,
             " lay out their shared memory differently; install the same version of rota for all"));
  }
  if (host != host_) {
    fail(join("rank ", peer, " is on host ", host, ", rank ", rank_, " on ", host_,
              "; this version connects the ranks of one host: make one group per host, or use "
              "Gloo or NCCL between hosts"));
  }
  return join(name, ' ', token);
}

}  // namespace rota::transport
