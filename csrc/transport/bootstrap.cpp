#include "transport/bootstrap.h"

#include <poll.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <unordered_map>

#include "base/error.h"
#include "schedule/hosts.h"

namespace rota::transport {
namespace {

constexpr const char* kCardsKey = "cards";
constexpr int kStorePollMs = 2;  // few enough requests for a store on a server

int checked_rank(int rank, int world_size) {
  if (rank < 0 || rank >= world_size)
    fail_transport(join("rank ", rank, " is not in [0, ", world_size, ")"));
  return rank;
}

// As a word of a card: "2", "2!" if it was set by hand, or "-".
std::string to_word(const NumaNode& node) {
  if (!node.number) return "-";
  return join(*node.number, node.is_set_by_hand ? "!" : "");
}
NumaNode parse_node(const std::string& word) {
  if (word == "-") return {};
  return {std::atoi(word.c_str()), word.ends_with('!')};
}

}  // namespace

class Bootstrap::Claim {
 public:
  Claim(Store& store, int rank, int world_size) : store_(store), key_(join("claim/", rank)) {
    if (store_.add(key_, 1) != 1) {
      fail_transport(join("two processes say they are rank ", rank, " of ", world_size,
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

// A card is one line of text: rank, address, world size, geometry, NUMA node; the host is the rest
// of the line.
Bootstrap::Bootstrap(Store& store, int rank, int world_size, const Geometry& geometry,
                     std::function<UniqueFd()> make_memory)
    : store_(store),
      rank_(checked_rank(rank, world_size)),
      world_size_(world_size),
      geometry_(geometry),
      host_(host_id()),
      own_(rank, world_size, std::move(make_memory), geometry.num_bytes(world_size)),
      line_(join(rank, ' ', own_.address(), ' ', world_size, ' ', geometry.message_bytes, ' ',
                 geometry.slot_bytes, ' ', geometry.num_cells, ' ', geometry.cell_bytes, ' ',
                 to_word(numa_node()), ' ', host_)) {
  store.append(kCardsKey, line_ + '\n');
}
Bootstrap::~Bootstrap() = default;

std::function<void(const Bootstrap::IsMissing&)> Bootstrap::make_check(
    std::chrono::milliseconds timeout, const std::function<void()>& check_interrupt) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  return [this, timeout, deadline, &check_interrupt](const IsMissing& is_missing) {
    check_interrupt();
    if (std::chrono::steady_clock::now() < deadline) return;
    std::string missing;
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == rank_ || !is_missing(peer)) continue;
      missing += join(missing.empty() ? "" : ", ", peer);
    }
    fail_transport(
        join("rank ", rank_, "/", world_size_, " still waits for rank ", missing,
             " to make this group, after ", timeout.count() / 1e3,
             " s: does it make the same group, Communicator or hook, in the same order as this "
             "rank, and is its process alive?"));
  };
}

std::vector<std::string> Bootstrap::hosts(std::chrono::milliseconds timeout,
                                          const std::function<void()>& check_interrupt,
                                          const WhyEnded& why_ended) {
  auto claim = std::make_unique<Claim>(store_, rank_, world_size_);
  read_all_cards(make_check(timeout, check_interrupt), why_ended);
  claim_ = std::move(claim);
  std::vector<std::string> hosts;
  for (const Card& card : cards_) hosts.push_back(card.host);
  return hosts;
}

std::vector<std::optional<Peer>> Bootstrap::rendezvous(
    std::chrono::milliseconds timeout, const std::function<void()>& check_interrupt) {
  const auto check = make_check(timeout, check_interrupt);
  const auto claim =
      claim_ ? std::move(claim_) : std::make_unique<Claim>(store_, rank_, world_size_);
  own_.prepare();
  // Reads all cards first: then every rank names the one that differs, before ranks that have read
  // its card give up and close their endpoints.
  read_all_cards(check);
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::string& host = cards_[static_cast<size_t>(peer)].host;
    if (host == host_) continue;
    fail_transport(join("rank ", peer, " is on host ", host, ", rank ", rank_, " on ", host_,
                        ", and they share no memory"));
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    own_.connect(peer, cards_[static_cast<size_t>(peer)].address,
                 [&] { check([this](int rank) { return !own_.has_peer(rank); }); });
  }
  return own_.take_peers();
}

// Polls instead of waiting in the store, so that a signal can interrupt it.
void Bootstrap::read_all_cards(const std::function<void(const IsMissing&)>& check,
                               const WhyEnded& why_ended) {
  if (!cards_.empty()) return;
  std::vector<Card> cards(static_cast<size_t>(world_size_));
  std::vector<std::string> ends(cards.size());  // of ranks that had ended before cards were read
  const auto is_missing = [&](int peer) {
    return cards[static_cast<size_t>(peer)].address.empty();
  };
  while (true) {
    const std::vector<std::string> lines = read_lines();
    for (int rank = 0; rank < world_size_; ++rank) {
      const std::string& line = lines[static_cast<size_t>(rank)];
      if (!line.empty()) cards[static_cast<size_t>(rank)] = parse(rank, line);
    }
    if (std::ranges::none_of(cards, &std::string::empty, &Card::address)) break;
    check(is_missing);
    for (int rank = 0; why_ended && rank < world_size_; ++rank) {
      if (rank == rank_ || !is_missing(rank)) continue;
      std::string& end = ends[static_cast<size_t>(rank)];
      if (!end.empty()) throw Error(ErrorKind::kPeerFailed, join("rota: ", end));
      // It may have published its card, done its part and ended since the cards were read.
      end = why_ended(rank);
    }
    poll(nullptr, 0, kStorePollMs);
  }
  check_nodes(cards);
  cards_ = std::move(cards);
}

void Bootstrap::check_nodes(const std::vector<Card>& cards) {
  const auto text = [&](size_t rank) {
    const NumaNode& node = cards[rank].node;
    return join("rank ", rank,
                node.is_set_by_hand ? join(" has ROTA_NUMA_NODE=", *node.number) : " has none");
  };
  std::unordered_map<std::string, size_t> first_of_host;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const size_t first = first_of_host.try_emplace(cards[rank].host, rank).first->second;
    if (cards[first].node.is_set_by_hand == cards[rank].node.is_set_by_hand) continue;
    fail_transport(join(text(first), ", ", text(rank),
                        "; set ROTA_NUMA_NODE for every rank of the host, or for none"));
  }
}

int Bootstrap::node_size() const {
  std::vector<std::string> nodes;
  for (const Card& card : cards_) {
    if (!card.node.number) return 0;
    nodes.push_back(std::to_string(*card.node.number));
  }
  const schedule::Hosts hosts(nodes);
  const int node_size = world_size_ / hosts.num_hosts();
  const bool is_level = hosts.num_hosts() > 1 && node_size > 1 && hosts.are_groups_of(node_size);
  return is_level ? node_size : 0;
}

// The cards of this group by rank, empty for a rank that has not made it yet. Groups that the ranks
// make one after the other over one store are told apart by counting: each rank's n-th card is of
// the n-th group.
std::vector<std::string> Bootstrap::read_lines() {
  std::vector<std::vector<std::string>> lines_of(static_cast<size_t>(world_size_));
  std::istringstream text(store_.get(kCardsKey));
  for (std::string line; std::getline(text, line);) {
    size_t rank = 0;
    in_classic_locale<std::istringstream>(line) >> rank;
    if (rank < lines_of.size()) lines_of[rank].push_back(line);
  }
  const std::vector<std::string>& own = lines_of[static_cast<size_t>(rank_)];
  group_number_ = static_cast<size_t>(std::ranges::find(own, line_) - own.begin());
  std::vector<std::string> lines;
  for (const std::vector<std::string>& of_rank : lines_of) {
    lines.push_back(group_number_ < of_rank.size() ? of_rank[group_number_] : "");
  }
  return lines;
}

Bootstrap::Card Bootstrap::parse(int peer, const std::string& line) const {
  auto parts = in_classic_locale<std::istringstream>(line);
  std::string rank, name, token, node, host;
  int world_size = 0;
  Geometry geometry{};
  parts >> rank >> name >> token >> world_size >> geometry.message_bytes >> geometry.slot_bytes >>
      geometry.num_cells >> geometry.cell_bytes >> node;
  parts.get();
  std::getline(parts, host);
  if (world_size != world_size_) {
    fail_transport(join("rank ", peer, " has world_size ", world_size, ", this rank ", rank_,
                        " has ", world_size_, "; start every rank with the same WORLD_SIZE"));
  }
  if (geometry.slot_bytes != geometry_.slot_bytes) {
    fail_transport(join("rank ", peer, " has slots of ", geometry.slot_bytes, " bytes, this rank ",
                        rank_, " of ", geometry_.slot_bytes,
                        "; give every rank the same slot_bytes"));
  }
  if (geometry != geometry_) {
    fail_transport(
        join("rank ", peer, " and rank ", rank_,
             " lay out their shared memory differently; install the same version of rota for all"));
  }
  return {join(name, ' ', token), host, parse_node(node)};
}

}  // namespace rota::transport
