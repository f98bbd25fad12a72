#include "transport/endpoint.h"

#include <cerrno>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/per_process.h"
#include "transport/heap.h"

namespace rota::transport {

Endpoint::Endpoint(int rank, int world_size, std::function<UniqueFd()> make_memory,
                   size_t num_bytes)
    : rank_(rank),
      num_bytes_(num_bytes),
      make_memory_(std::move(make_memory)),
      heap_(per_process<Heap>().memory()),
      token_(random_number()),
      listener_(Listener::open()),
      peers_(static_cast<size_t>(world_size)),
      refusals_(static_cast<size_t>(world_size)) {
  listener_->add(token_, *this);
}

Endpoint::~Endpoint() { listener_->remove(token_); }

std::string Endpoint::address() const { return listener_->address_of(token_).to_string(); }

bool Endpoint::has_peer(int peer) const {
  const std::lock_guard lock(listener_->mutex());
  return peers_[static_cast<size_t>(peer)].has_value();
}

void Endpoint::prepare() {
  const std::lock_guard lock(listener_->mutex());
  make_memory_once();
}

void Endpoint::make_memory_once() {
  if (memory_.get() < 0) memory_ = make_memory_();
}

void Endpoint::connect(int peer, const std::string& peer_address,
                       const std::function<void()>& check) {
  if (has_peer(peer)) return;
  try {
    const std::string who = join("rank ", peer);
    auto address = in_classic_locale<std::istringstream>(peer_address);
    Answer answer = ask(Address::read(address), static_cast<uint64_t>(rank_), {&memory_, &heap_},
                        who, who + " has left the group; make a new one on every rank", check);
    Peer mapped = map(peer, std::move(answer.process), answer.descriptors);
    const std::lock_guard lock(listener_->mutex());
    std::optional<Peer>& place = peers_[static_cast<size_t>(peer)];
    if (!place) place.emplace(std::move(mapped));  // otherwise both sides have connected at once
  } catch (const Error&) {
    const std::lock_guard lock(listener_->mutex());
    // The peer may have connected to this rank meanwhile, and closed its endpoint afterwards.
    if (peers_[static_cast<size_t>(peer)]) return;
    // Or it gave up because this rank refused it: then the refusal is the cause to report.
    std::string& refusal = refusals_[static_cast<size_t>(peer)];
    if (!refusal.empty()) throw Error(ErrorKind::kTransport, std::exchange(refusal, {}));
    throw;
  }
}

void Endpoint::answer(UniqueFd& connection, ReceivedHello& received) {
  if (received.hello.rank >= peers_.size()) return;
  const auto peer = static_cast<int>(received.hello.rank);
  if (peer == rank_) return;
  Hello own{.token = token_, .rank = static_cast<uint64_t>(rank_)};
  try {
    make_memory_once();
    std::optional<Peer>& place = peers_[static_cast<size_t>(peer)];
    // Otherwise both sides have connected at once.
    if (!place) place.emplace(map(peer, process_of(connection), received.descriptors));
  } catch (const Error& error) {
    own.refuse(error.what());
    refusals_[static_cast<size_t>(peer)] = error.what();
  }
  // Without memory, it is a refusal.
  if (memory_.get() < 0) {
    send_hello(connection, own, {});
  } else {
    send_hello(connection, own, {&memory_, &heap_});
  }
}

Peer Endpoint::map(int peer, std::shared_ptr<PeerProcess> process,
                   const std::vector<UniqueFd>& descriptors) const {
  if (descriptors.size() != 2) {
    fail_transport(with_errno("cannot take over a peer's memory", EMFILE) + "; raise `ulimit -n`");
  }
  Mapping region = map_peer(descriptors[0], num_bytes_, peer);
  process->take_heap(descriptors[1]);
  return {std::move(process), std::move(region)};
}

std::vector<std::optional<Peer>> Endpoint::take_peers() {
  const std::lock_guard lock(listener_->mutex());
  return std::move(peers_);
}

}  // namespace rota::transport
