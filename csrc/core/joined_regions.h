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
  // To be called where no kernel of this rank touches regions any more; on the GPU that they were
  // made on. Waits until that is so on every rank, unmaps those of the peers, waits until nobody
  // maps the own one, and frees it. Each wait is bounded, and nobody is waited for who is dead or
  // has left (joined_regions.cpp). A forked child waits for nobody, and tells nobody.
  ~JoinedRegions();
  JoinedRegions(const JoinedRegions&) = delete;
  JoinedRegions& operator=(const JoinedRegions&) = delete;

  const std::vector<std::byte*>& by_rank() const { return regions_.by_rank; }
  std::string_view means() const { return regions_.means; }

 private:
  // Says that this rank has come to the next step, and waits for those of awaited_; forgets who
  // does not come.
  void take_step();

  Communicator& communicator_;
  transport::DeviceRegions regions_;
  std::vector<int> awaited_;
  uint64_t fork_generation_;
};

}  // namespace rota
