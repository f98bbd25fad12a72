// Memory on GPUs that ranks write into, of the ranks of one host: each allocates a region and maps
// those of its peers. Knows nothing of what lies in a region (transport/device_layout.h does).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace rota::transport {

// Gathers what every rank hands over, by rank. Blocks; every rank calls it.
using AllGatherText = std::function<std::vector<std::string>(const std::string& own)>;

// Runs body on every rank. Throws Error(kTransport) on every rank if it throws on any, with the
// first line of what each threw.
void agree(const AllGatherText& all_gather, int rank, const std::function<void()>& body);

struct DeviceRegions {
  std::vector<std::byte*> by_rank;  // in this process's address space; zeroed when made
  std::string_view means;           // how they were mapped
  // Unmapped before it is freed, also where both go at once: members are destroyed in reverse.
  std::shared_ptr<void> own;     // frees the regions of this process
  std::shared_ptr<void> mapped;  // unmaps those of others
};

// On the current GPU, by CUDA's handles between processes. Collective. Throws Error(kTransport), on
// every rank: memory is short, a GPU cannot reach another's or does not see it.
//
// The caching allocator's memory would not do: with expandable segments it has no handles.
DeviceRegions connect_by_ipc(int rank, size_t num_bytes, const AllGatherText& all_gather);

// For ranks that are parts of one process and share the current GPU.
DeviceRegions allocate_regions(int num_ranks, size_t num_bytes);

}  // namespace rota::transport
