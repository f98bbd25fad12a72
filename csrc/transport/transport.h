// What an executor needs of a transport: everybody's region, and who is still there.
#pragma once

#include <optional>
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
  const Region& own() const { return own_; }
  const RegionView& region(int rank) const { return regions_[static_cast<size_t>(rank)]; }

  // "rank 1 (pid 4711)", as errors name a peer.
  virtual std::string describe(int peer) const = 0;

  // The lowest rank whose process has ended, if any. Costs one system call.
  virtual std::optional<int> find_dead_peer() const = 0;

 protected:
  Transport(int rank, const Geometry& geometry, Region own, std::vector<RegionView> regions)
      : rank_(rank), geometry_(geometry), own_(own), regions_(std::move(regions)) {}

 private:
  int rank_;
  Geometry geometry_;
  Region own_;
  std::vector<RegionView> regions_;  // by rank, the own one included
};

}  // namespace rota::transport
