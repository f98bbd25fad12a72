// The executors' view of a transport: all ranks' regions, and which ranks are alive.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/core_sharing.h"
#include "base/error.h"
#include "base/life_word.h"
#include "transport/layout.h"

namespace rota::transport {

class Transport {
 public:
  virtual ~Transport() = default;

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(regions_.size()); }
  const Geometry& geometry() const { return geometry_; }
  const Region& region(int rank) const { return regions_[static_cast<size_t>(rank)]; }
  const Region& own() const { return region(rank_); }
  // The same word in every peer's control block.
  std::vector<const Flag*> peers_flags(Flag ControlBlock::* word) const {
    std::vector<const Flag*> flags;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank_) flags.push_back(&(region(peer).control().*word));
    }
    return flags;
  }
  // Only this rank writes it.
  ControlBlock& own_control() const { return const_cast<ControlBlock&>(own().control()); }

  // Reserves part of this rank's region, after which all ranks may touch it. Repeated calls do
  // nothing. Throws Error(kTransport) if memory is short.
  virtual void reserve(const Span& span) = 0;

  // Reserves what collectives with this many slots use, unless it is already.
  void reserve_slots(int num_slots) {
    if (num_slots <= num_reserved_slots_) return;
    reserve(geometry_.collectives(num_slots));
    num_reserved_slots_ = num_slots;
  }

  // For errors: the ranks' numbers in the group of which they are one host's part, and how many
  // that has. None: these ranks are the group.
  struct Numbering {
    std::vector<int> ranks;
    int world_size;
  };
  void set_numbering(Numbering numbering) { numbering_ = std::move(numbering); }
  bool is_among_hosts() const { return numbering_.has_value(); }
  int number_of(int rank) const {
    return numbering_ ? numbering_->ranks[static_cast<size_t>(rank)] : rank;
  }
  // "2/4", this rank among all.
  std::string number_of_all() const {
    return join(number_of(rank_), '/', numbering_ ? numbering_->world_size : world_size());
  }

  // How many consecutive ranks are on each of several NUMA nodes; 0: nodes are no level.
  void set_node_size(int node_size) { node_size_ = node_size; }
  int node_size() const { return node_size_; }

  // The heap of the peer's process, read-only. Empty if it could not be mapped.
  virtual std::span<const std::byte> heap_of(int peer) const = 0;

  // The peer's name in errors: "rank 1 (pid 4711)".
  virtual std::string describe(int peer) const = 0;

  // The word of the peer's process; null for the own one, or if it could not be mapped.
  virtual const LifeWord* life_of(int peer) const = 0;

  // Where this process says which core it is on; null if ranks do not tell each other.
  virtual CoreWord* own_core() const = 0;
  // The words of every other rank's process; empty if one of them could not be mapped.
  std::vector<const CoreWord*> other_cores() const {
    std::vector<const CoreWord*> cores;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank_) continue;
      const CoreWord* core = core_of(peer);
      if (core == nullptr) return {};
      cores.push_back(core);
    }
    return cores;
  }

  // The ranks whose processes have ended. Costs a system call.
  virtual std::vector<int> find_ended_peers() const = 0;
  // Also those that the kernel has begun to end: it takes milliseconds to unmap their memory.
  std::vector<int> find_dead_peers() const {
    std::vector<int> dead = find_ended_peers();
    for (int peer = 0; peer < world_size(); ++peer) {
      const LifeWord* life = life_of(peer);
      if (life != nullptr && life->is_ending()) dead.push_back(peer);
    }
    return dead;
  }

 protected:
  Transport(int rank, const Geometry& geometry, std::vector<Region> regions)
      : rank_(rank), geometry_(geometry), regions_(std::move(regions)) {}

 private:
  // Null for the own process, or if it could not be mapped.
  virtual const CoreWord* core_of(int peer) const = 0;

  int rank_;
  Geometry geometry_;
  std::vector<Region> regions_;  // by rank
  int num_reserved_slots_ = 0;
  std::optional<Numbering> numbering_;
  int node_size_ = 0;
};

}  // namespace rota::transport
