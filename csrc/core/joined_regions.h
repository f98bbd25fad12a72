// Memory on GPUs that all ranks of a communicator write into, and its end: no rank frees its region
// while a peer's kernel may still store there, or while a peer maps it.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "core/communicator.h"
#include "transport/device_regions.h"

namespace rota {

class JoinedRegions {
 public:
  // The communicator outlives it. Every rank has its own part.
  JoinedRegions(Communicator& communicator, transport::DeviceRegions regions);
  // Call it on the regions' GPU once no kernel of this rank touches them. Waits until that holds on
  // every rank, unmaps the peers' regions, waits until no peer maps this rank's region, and frees
  // it. Each wait is bounded and skips ranks that are dead or have left (joined_regions.cpp). A
  // forked child neither waits nor signals.
  ~JoinedRegions();
  JoinedRegions(const JoinedRegions&) = delete;
  JoinedRegions& operator=(const JoinedRegions&) = delete;

  const std::vector<std::byte*>& by_rank() const { return regions_.by_rank; }
  // Frees this rank's.
  const std::shared_ptr<void>& own() const { return regions_.own; }
  std::string_view means() const { return regions_.means; }

 private:
  // Signals this rank's next step and waits for the ranks in awaited_; removes those that do not
  // come in time.
  void take_step();

  Communicator& communicator_;
  transport::DeviceRegions regions_;
  std::vector<int> awaited_;
  uint64_t fork_generation_;
};

}  // namespace rota
