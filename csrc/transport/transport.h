// What an executor needs of a transport: everybody's region, and who is still there.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
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
  // One word of each peer.
  std::vector<const Flag*> peers_flags(Flag ControlBlock::* word) const {
    std::vector<const Flag*> flags;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank_) flags.push_back(&(region(peer).control().*word));
    }
    return flags;
  }
  // This rank is its only writer.
  ControlBlock& own_control() const { return const_cast<ControlBlock&>(own().control()); }

  // Reserves memory of the own region, which this rank and its peers may touch from then on; again
  // it does nothing. Throws Error(kTransport) where memory is short.
  virtual void reserve(const Span& span) = 0;

  // "rank 1 (pid 4711)", as errors name a peer.
  virtual std::string describe(int peer) const = 0;

  // The ranks whose processes have ended; of `awaited`, also one that is about to: before the
  // kernel says that a process has ended, it unmaps its memory, which takes milliseconds. Costs two
  // system calls.
  virtual std::vector<int> find_dead_peers(int awaited) const = 0;

 protected:
  Transport(int rank, const Geometry& geometry, std::vector<Region> regions)
      : rank_(rank), geometry_(geometry), regions_(std::move(regions)) {}

 private:
  int rank_;
  Geometry geometry_;
  std::vector<Region> regions_;  // by rank
};

}  // namespace rota::transport
