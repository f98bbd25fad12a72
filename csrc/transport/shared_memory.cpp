#include "transport/shared_memory.h"

#include <unistd.h>

#include <utility>

#include "base/fork_generation.h"
#include "base/per_process.h"
#include "transport/heap.h"

namespace rota::transport {
namespace {

std::vector<Region> regions_of(const std::vector<Peer>& peers, const Geometry& geometry) {
  std::vector<Region> regions;
  for (const Peer& peer : peers) regions.emplace_back(peer.region.base(), geometry);
  return regions;
}

}  // namespace

SharedMemoryTransport::SharedMemoryTransport(int rank, const Geometry& geometry,
                                             std::vector<Peer> peers, bool is_reserved)
    : Transport(rank, geometry, regions_of(peers, geometry)),
      peers_(std::move(peers)),
      is_reserved_(is_reserved),
      listener_(world_size() > 1 ? Listener::open() : nullptr) {}

void SharedMemoryTransport::reserve(const Span& span) {
  if (!is_reserved_) reserve_pages(own().at(0), span);
}

std::span<const std::byte> SharedMemoryTransport::heap_of(int peer) const {
  return peers_[static_cast<size_t>(peer)].process->heap();
}

std::string SharedMemoryTransport::describe(int peer) const {
  return join("rank ", number_of(peer), " (pid ", peers_[static_cast<size_t>(peer)].process->pid(),
              ")");
}

const LifeWord* SharedMemoryTransport::life_of(int peer) const {
  return peers_[static_cast<size_t>(peer)].process->life();
}

CoreWord* SharedMemoryTransport::own_core() const { return &per_process<Heap>().words().core; }

const CoreWord* SharedMemoryTransport::core_of(int peer) const {
  return peers_[static_cast<size_t>(peer)].process->core();
}

std::vector<int> SharedMemoryTransport::find_ended_peers() const {
  std::vector<const PeerProcess*> processes;
  for (const Peer& peer : peers_) processes.push_back(peer.process.get());
  const std::vector<size_t> ended = PeerProcess::find_ended(processes);
  return {ended.begin(), ended.end()};
}

SharedMemoryRank::SharedMemoryRank(Store& store, int rank, int world_size, const Geometry& geometry)
    : fork_generation_(fork_generation()), rank_(rank), geometry_(geometry) {
  bootstrap_.emplace(store, rank, world_size, geometry, [this, world_size] {
    OwnMemory own = OwnMemory::make(geometry_, world_size);
    region_.emplace(std::move(own.region));
    is_reserved_ = own.is_reserved;
    return std::move(own.memory);
  });
}

SharedMemoryRank::~SharedMemoryRank() {
  bootstrap_.reset();  // nobody else uses region_ from now on
  // A forked child shares its parent's memory, but must not report the parent's departure.
  if (!region_ || fork_generation_ != fork_generation()) return;
  reinterpret_cast<ControlBlock*>(region_->base())->departed.publish(1);
}

std::unique_ptr<Transport> SharedMemoryRank::connect(std::chrono::milliseconds timeout,
                                                     const std::function<void()>& check_interrupt) {
  // Fails before the rendezvous if there is no memory for the first collective.
  check_available(geometry_.collectives(kNumSlots).num_bytes);
  std::vector<Peer> peers;
  for (std::optional<Peer>& peer : bootstrap_->rendezvous(timeout, check_interrupt)) {
    if (peer) {
      peers.push_back(std::move(*peer));
    } else {
      peers.push_back({std::make_shared<PeerProcess>(getpid(), UniqueFd()),
                       *std::exchange(region_, std::nullopt)});
    }
  }
  auto transport =
      std::make_unique<SharedMemoryTransport>(rank_, geometry_, std::move(peers), is_reserved_);
  transport->set_node_size(bootstrap_->node_size());
  return transport;
}

}  // namespace rota::transport
