#include "transport/device_regions.h"

#include <unistd.h>

#include <cstring>
#include <optional>

#include "transport/cuda_error.h"
#include "transport/gpu_identity.h"

namespace rota::transport {
namespace {

// Regions start at multiples of a page, which every word in them may rely on.
constexpr size_t kRegionGranuleBytes = 4096;

// Errors on the way down are nobody's to handle: the process may be ending, and the driver gone.
using DeviceMemory = std::shared_ptr<void>;

// Zeroed, on the current GPU.
DeviceMemory allocate(size_t num_bytes) {
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, num_bytes), join("cudaMalloc of ", num_bytes, " bytes"));
  DeviceMemory memory(data, [](void* address) { forget_error(cudaFree(address)); });
  check_cuda(cudaMemset(data, 0, num_bytes), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return memory;
}

// Another process's.
DeviceMemory map(const cudaIpcMemHandle_t& handle) {
  void* data = nullptr;
  check_cuda(cudaIpcOpenMemHandle(&data, handle, cudaIpcMemLazyEnablePeerAccess),
             "cudaIpcOpenMemHandle");
  return {data, [](void* address) { forget_error(cudaIpcCloseMemHandle(address)); }};
}

struct Card {
  GpuIdentity gpu;
  pid_t pid;
  cudaIpcMemHandle_t handle;
};

// A GPU that this process does not see cannot be asked about, but may be in reach.
void check_reach(const Card& card, int peer) {
  const int own = current_gpu();
  const std::optional<int> other = find_gpu(card.gpu);
  int can_reach = 1;
  if (other && *other != own) {
    check_cuda(cudaDeviceCanAccessPeer(&can_reach, own, *other), "cudaDeviceCanAccessPeer");
  }
  if (can_reach == 0) {
    throw Error(ErrorKind::kTransport,
                join("has GPU ", own, ", which cannot reach GPU ", *other, " of rank ", peer,
                     ": they have neither NVLink nor PCIe peer access"));
  }
  if (card.pid == getpid()) {
    throw Error(ErrorKind::kTransport,
                join("is in the same process as rank ", peer, "; use rota.LocalGroup for that"));
  }
}

}  // namespace

void agree(const AllGatherText& all_gather, int rank, const std::function<void()>& body) {
  std::string complaint;
  try {
    body();
  } catch (const std::exception& exception) {
    const std::string text = exception.what();
    complaint = join("rank ", rank, ": ", text.substr(0, text.find('\n')));
  }
  std::string all;
  for (const std::string& text : all_gather(complaint)) {
    if (!text.empty()) all += (all.empty() ? "" : "; ") + text;
  }
  if (!all.empty()) fail_transport("no peer memory: " + all);
}

DeviceRegions connect_by_ipc(int rank, size_t num_bytes, const AllGatherText& all_gather) {
  DeviceMemory own;
  const auto mapped = std::make_shared<std::vector<DeviceMemory>>();
  Card own_card{.pid = getpid()};
  agree(all_gather, rank, [&] {
    own_card.gpu = identity_of_gpu(current_gpu());
    own = allocate(num_bytes);
    check_cuda(cudaIpcGetMemHandle(&own_card.handle, own.get()), "cudaIpcGetMemHandle");
  });
  const std::vector<std::string> cards =
      all_gather(std::string(reinterpret_cast<const char*>(&own_card), sizeof(own_card)));
  DeviceRegions regions{.means = "CUDA IPC", .own = own, .mapped = mapped};
  agree(all_gather, rank, [&] {
    for (int peer = 0; peer < static_cast<int>(cards.size()); ++peer) {
      if (peer == rank) {
        regions.by_rank.push_back(static_cast<std::byte*>(own.get()));
        continue;
      }
      Card card;
      std::memcpy(&card, cards[static_cast<size_t>(peer)].data(), sizeof(card));
      check_reach(card, peer);
      mapped->push_back(map(card.handle));
      regions.by_rank.push_back(static_cast<std::byte*>(mapped->back().get()));
    }
  });
  return regions;
}

DeviceRegions allocate_regions(int num_ranks, size_t num_bytes) {
  const size_t stride =
      (num_bytes + kRegionGranuleBytes - 1) / kRegionGranuleBytes * kRegionGranuleBytes;
  const DeviceMemory memory = allocate(static_cast<size_t>(num_ranks) * stride);
  DeviceRegions regions{.means = "one process", .own = memory};
  for (int rank = 0; rank < num_ranks; ++rank) {
    regions.by_rank.push_back(static_cast<std::byte*>(memory.get()) +
                              static_cast<size_t>(rank) * stride);
  }
  return regions;
}

}  // namespace rota::transport
