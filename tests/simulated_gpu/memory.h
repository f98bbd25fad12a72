// What has been allocated: device memory, which is a file in memory of its own, so that another
// process can map it, and host memory that kernels may use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "settings.h"

namespace simulated_gpu {

enum class MemoryKind {
  kDevice,      // cudaMalloc
  kImported,    // another process's cudaMalloc
  kHost,        // cudaHostAlloc
  kRegistered,  // cudaHostRegister
};

struct Allocation {
  MemoryKind kind;
  int device;
  std::byte* base;
  size_t num_bytes;  // as they were asked for
  // With pages that nobody may touch on both sides; of device memory.
  std::byte* pages = nullptr;
  size_t page_bytes = 0;
  int fd = -1;

  bool is_on_device() const { return kind == MemoryKind::kDevice || kind == MemoryKind::kImported; }
};

class Memory {
 public:
  // Counts what each device holds for all processes together, without their contexts.
  size_t total_bytes() const { return settings().memory_mib << 20; }
  size_t used_bytes(int device) const;

  // Filled with 0xff: NaN in every floating-point dtype. Overruns are faults where they reach the
  // next page, and reported by free_device() where they do not.
  void* allocate_device(int device, size_t num_bytes);
  void free_device(void* base);
  void* allocate_host(size_t num_bytes);
  void free_host(void* base);
  void register_host(void* base, size_t num_bytes);
  void unregister_host(void* base);

  // Maps the pages of another process's allocation, of which the file is given; takes it over.
  // Accesses are faults once the owner has freed it, and release_import() reports that it has.
  void* import(int device, int fd, size_t page_bytes, size_t offset, size_t num_bytes);
  void release_import(void* base);

  // The allocation that an address lies in.
  std::optional<Allocation> find(const void* address) const;
  // The same with the pages on both sides of device memory; for a fault, so it does not wait.
  std::optional<Allocation> find_fenced(const void* address) const;

 private:
  // Forgets the allocation that starts here, which must be of this kind.
  Allocation remove(void* base, MemoryKind kind);
  void add(const Allocation& allocation);

  mutable std::mutex mutex_;
  std::map<uintptr_t, Allocation> by_base_;
};

Memory& memory();

}  // namespace simulated_gpu
