// torch's symmetric memory on simulated GPUs: an allocator beside torch's own, which needs the
// driver's virtual memory management. Ranks meet as torch's do: over the store of the process group
// that goes by the name that the memory was made with.
//
// The library goes by the name of NVML, which is found wherever torch's symmetric memory works.
#include <cuda_runtime_api.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cstring>
#include <map>
#include <mutex>

namespace {

namespace symmetric = c10d::symmetric_memory;

void check(cudaError_t error) { TORCH_CHECK(error == cudaSuccess, cudaGetErrorString(error)); }

// Everybody's memory; that of peers is mapped by CUDA's handles between processes.
class Mapping final : public symmetric::SymmetricMemory {
 public:
  Mapping(void* own, size_t num_bytes, c10::Device device, const std::string& group_name)
      : own_(own), num_bytes_(num_bytes), device_(device) {
    const auto group = c10d::resolve_process_group(group_name);
    rank_ = group->getRank();
    const auto store = group->getStore();
    const auto key = [&](int rank) { return group_name + "/" + std::to_string(rank); };
    cudaIpcMemHandle_t handle;
    check(cudaIpcGetMemHandle(&handle, own));
    const auto* bytes = reinterpret_cast<const uint8_t*>(&handle);
    store->set(key(rank_), std::vector<uint8_t>(bytes, bytes + sizeof(handle)));
    for (int peer = 0; peer < group->getSize(); ++peer) {
      const std::vector<uint8_t> given = store->get(key(peer));
      std::memcpy(&handle, given.data(), sizeof(handle));
      buffers_.push_back(own);
      if (peer == rank_) continue;
      check(cudaIpcOpenMemHandle(&buffers_.back(), handle, cudaIpcMemLazyEnablePeerAccess));
    }
  }
  ~Mapping() override {
    for (void* buffer : buffers_) {
      if (buffer != own_) cudaIpcCloseMemHandle(buffer);
    }
  }

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  size_t get_buffer_size() override { return num_bytes_; }
  size_t get_offset() override { return 0; }
  int get_rank() override { return rank_; }
  int get_world_size() override { return static_cast<int>(buffers_.size()); }
  c10::Device get_device() override { return device_; }
  bool has_multicast_support() override { return false; }

  void* get_multicast_ptr() override { return nullptr; }
  std::vector<void*> get_signal_pad_ptrs() override { refuse(); }
  void** get_buffer_ptrs_dev() override { refuse(); }
  void** get_signal_pad_ptrs_dev() override { refuse(); }
  void barrier(int, size_t) override { refuse(); }
  void put_signal(int, int, size_t) override { refuse(); }
  void wait_signal(int, int, size_t) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { TORCH_CHECK(false, "not in simulated symmetric memory"); }

  void* own_;
  size_t num_bytes_;
  c10::Device device_;
  int rank_ = 0;
  std::vector<void*> buffers_;  // by rank
};

class Allocator final : public symmetric::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t num_bytes, int device, const std::optional<std::string>&) override {
    void* memory = nullptr;
    check(cudaSetDevice(device));
    check(cudaMalloc(&memory, num_bytes));
    const std::lock_guard guard(mutex_);
    blocks_[memory] = {num_bytes, device};
    return memory;
  }

  void free(void* memory) override {
    {
      const std::lock_guard guard(mutex_);
      blocks_.erase(memory);
    }
    check(cudaFree(memory));
  }

  size_t get_alloc_size(void* memory) override { return block(memory).num_bytes; }

  c10::intrusive_ptr<symmetric::SymmetricMemory> rendezvous(
      void* memory, const std::optional<std::string>& group_name) override {
    const Block own = block(memory);
    return c10::make_intrusive<Mapping>(
        memory, own.num_bytes, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(own.device)),
        group_name.value());
  }

  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCUDA; }
  std::string name() override { return "simulated"; }

 private:
  struct Block {
    size_t num_bytes;
    int device;
  };

  Block block(void* memory) {
    const std::lock_guard guard(mutex_);
    return blocks_.at(memory);
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
};

const bool is_registered = [] {
  symmetric::register_allocator(c10::kCUDA, c10::make_intrusive<Allocator>());
  return true;
}();

}  // namespace
