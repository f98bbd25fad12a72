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

// On the current GPU. Errors on the way down are nobody's to handle: the process may be ending, and
// the driver gone.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t num_bytes) {
    check_cuda(cudaMalloc(&data_, num_bytes), join("cudaMalloc of ", num_bytes, " bytes"));
    check_cuda(cudaMemset(data_, 0, num_bytes), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { forget_error(cudaFree(data_)); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Another process's.
class MappedMemory {
 public:
  explicit MappedMemory(const cudaIpcMemHandle_t& handle) {
    check_cuda(cudaIpcOpenMemHandle(&data_, handle, cudaIpcMemLazyEnablePeerAccess),
               "cudaIpcOpenMemHandle");
  }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  ~MappedMemory() { forget_error(cudaIpcCloseMemHandle(data_)); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

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
  if (!all.empty()) throw Error(ErrorKind::kTransport, join("rota: no peer memory: ", all));
}

DeviceRegions connect_by_ipc(int rank, size_t num_bytes, const AllGatherText& all_gather) {
  std::shared_ptr<DeviceMemory> own;
  const auto mapped = std::make_shared<std::vector<std::unique_ptr<MappedMemory>>>();
  Card own_card{.pid = getpid()};
  agree(all_gather, rank, [&] {
    own_card.gpu = identity_of_gpu(current_gpu());
    own = std::make_shared<DeviceMemory>(num_bytes);
    check_cuda(cudaIpcGetMemHandle(&own_card.handle, own->data()), "cudaIpcGetMemHandle");
  });
  const std::vector<std::string> cards =
      all_gather(std::string(reinterpret_cast<const char*>(&own_card), sizeof(own_card)));
  DeviceRegions regions{.means = "CUDA IPC", .own = own, .mapped = mapped};
  agree(all_gather, rank, [&] {
    for (int peer = 0; peer < static_cast<int>(cards.size()); ++peer) {
      if (peer == rank) {
        regions.by_rank.push_back(static_cast<std::byte*>(own->data()));
        continue;
      }
      Card card;
      std::memcpy(&card, cards[static_cast<size_t>(peer)].data(), sizeof(card));
      check_reach(card, peer);
      mapped->push_back(std::make_unique<MappedMemory>(card.handle));
      regions.by_rank.push_back(static_cast<std::byte*>(mapped->back()->data()));
    }
  });
  return regions;
}

DeviceRegions allocate_regions(int num_ranks, size_t num_bytes) {
  const size_t stride =
      (num_bytes + kRegionGranuleBytes - 1) / kRegionGranuleBytes * kRegionGranuleBytes;
  const auto memory = std::make_shared<DeviceMemory>(static_cast<size_t>(num_ranks) * stride);
  DeviceRegions regions{.means = "one process", .own = memory};
  for (int rank = 0; rank < num_ranks; ++rank) {
    regions.by_rank.push_back(static_cast<std::byte*>(memory->data()) +
                              static_cast<size_t>(rank) * stride);
  }
  return regions;
}

}  // namespace rota::transport
