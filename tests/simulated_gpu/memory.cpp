#include "memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "capture.h"
#include "devices.h"
#include "result.h"
#include "streams.h"

namespace simulated_gpu {
namespace {

constexpr size_t kPageBytes = 4096;
// What torch relies on.
constexpr size_t kAlignment = 512;
constexpr int kPoison = 0xff;
constexpr auto kCanary = std::byte{0x5a};
// More is not filled, for time's sake.
constexpr size_t kMostPoisoned = size_t{64} << 20;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Maps a file's pages, with one on either side that faults.
std::byte* map_with_guards(int fd, size_t page_bytes) {
  void* reserved = mmap(nullptr, page_bytes + 2 * kPageBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(reserved != MAP_FAILED, cudaErrorMemoryAllocation);
  std::byte* pages = static_cast<std::byte*>(reserved) + kPageBytes;
  void* mapped = mmap(pages, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  require(mapped == pages, cudaErrorMemoryAllocation);
  return pages;
}

void unmap(const Allocation& allocation) {
  munmap(allocation.pages - kPageBytes, allocation.page_bytes + 2 * kPageBytes);
  close(allocation.fd);
}

void check_canaries(const Allocation& allocation) {
  const std::byte* const end = allocation.pages + allocation.page_bytes;
  const std::byte* const base_end = allocation.base + allocation.num_bytes;
  const auto check = [&](const std::byte* from, const std::byte* to) {
    for (const std::byte* place = from; place < to; ++place) {
      if (*place == kCanary) continue;
      std::fprintf(stderr,
                   "simulated GPU: something wrote %td bytes from the start of an allocation of "
                   "%zu bytes\n",
                   place - allocation.base, allocation.num_bytes);
      std::abort();
    }
  };
  check(allocation.pages, allocation.base);
  check(base_end, end);
}

struct sigaction previous_segv, previous_bus;

// Not safe in a handler by the letter, but the process is at its end.
void handle(int signal, siginfo_t* info, void*) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  if (const auto allocation = memory().find_fenced(address)) {
    char thread[16] = "";
    pthread_getname_np(pthread_self(), thread, sizeof(thread));
    std::fprintf(stderr,
                 "simulated GPU: access to byte %td of an allocation of %zu bytes%s, by a thread "
                 "named %s (kernels' threads have their names)\n",
                 address - allocation->base, allocation->num_bytes,
                 signal == SIGBUS ? " that its process has freed" : "", thread);
  }
  // The access is tried again, and meets the handler from before.
  sigaction(signal, signal == SIGBUS ? &previous_bus : &previous_segv, nullptr);
}

// From now on a fault says which allocation of device memory it is next to, and in which kernel.
// What handled faults before still does, afterwards.
void report_faults() {
  struct sigaction action{};
  action.sa_sigaction = &handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}

}  // namespace

// Never destroyed: allocations are freed while the process ends.
Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

size_t Memory::used_bytes(int device) const {
  const std::lock_guard guard(mutex_);
  size_t num_bytes = 0;
  for (const auto& [base, allocation] : by_base_) {
    const bool counts = allocation.kind == MemoryKind::kDevice && allocation.device == device;
    if (counts) num_bytes += allocation.page_bytes;
  }
  return num_bytes;
}

void* Memory::allocate_device(int device, size_t num_bytes) {
  static std::once_flag first;
  std::call_once(first, report_faults);
  if (num_bytes > total_bytes() - used_bytes(device)) fail(cudaErrorMemoryAllocation);
  const size_t page_bytes = round_up(num_bytes, kPageBytes);
  const int fd = memfd_create("simulated GPU", MFD_CLOEXEC);
  require(fd >= 0 && ftruncate(fd, static_cast<off_t>(page_bytes)) == 0, cudaErrorMemoryAllocation);
  std::byte* pages = map_with_guards(fd, page_bytes);
  // As near to its end as alignment allows.
  std::byte* base = pages + page_bytes - round_up(num_bytes, kAlignment);
  std::memset(pages, static_cast<int>(kCanary), static_cast<size_t>(base - pages));
  std::memset(base, kPoison, std::min(num_bytes, kMostPoisoned));
  std::memset(base + num_bytes, static_cast<int>(kCanary),
              static_cast<size_t>(pages + page_bytes - base) - num_bytes);
  add({MemoryKind::kDevice, device, base, num_bytes, pages, page_bytes, fd});
  return base;
}

void Memory::free_device(void* base) {
  const Allocation allocation = remove(base, MemoryKind::kDevice);
  check_canaries(allocation);
  // CUDA does not say what becomes of the mappings of other processes: here, an access faults.
  require(ftruncate(allocation.fd, 0) == 0, cudaErrorUnknown);
  unmap(allocation);
}

void* Memory::allocate_host(size_t num_bytes) {
  void* base = mmap(nullptr, round_up(num_bytes, kPageBytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(base != MAP_FAILED, cudaErrorMemoryAllocation);
  add({MemoryKind::kHost, current_device(), static_cast<std::byte*>(base), num_bytes});
  return base;
}

void Memory::free_host(void* base) {
  const Allocation allocation = remove(base, MemoryKind::kHost);
  munmap(base, round_up(allocation.num_bytes, kPageBytes));
}

void Memory::register_host(void* base, size_t num_bytes) {
  if (find(base)) fail(cudaErrorHostMemoryAlreadyRegistered);
  add({MemoryKind::kRegistered, current_device(), static_cast<std::byte*>(base), num_bytes});
}

void Memory::unregister_host(void* base) { remove(base, MemoryKind::kRegistered); }

void* Memory::import(int device, int fd, size_t page_bytes, size_t offset, size_t num_bytes) {
  std::byte* pages = map_with_guards(fd, page_bytes);
  add({MemoryKind::kImported, device, pages + offset, num_bytes, pages, page_bytes, fd});
  return pages + offset;
}

void Memory::release_import(void* base) {
  const Allocation allocation = remove(base, MemoryKind::kImported);
  struct stat status;
  if (fstat(allocation.fd, &status) == 0 && status.st_size == 0) {
    std::fprintf(stderr,
                 "simulated GPU: another process has freed its %zu bytes while they were mapped\n",
                 allocation.num_bytes);
  }
  unmap(allocation);
}

std::optional<Allocation> Memory::find(const void* address) const {
  const std::lock_guard guard(mutex_);
  const auto value = reinterpret_cast<uintptr_t>(address);
  auto next = by_base_.upper_bound(value);
  if (next == by_base_.begin()) return std::nullopt;
  const Allocation& allocation = std::prev(next)->second;
  if (value - reinterpret_cast<uintptr_t>(allocation.base) >= allocation.num_bytes) {
    return std::nullopt;
  }
  return allocation;
}

std::optional<Allocation> Memory::find_fenced(const void* address) const {
  const std::unique_lock guard(mutex_, std::try_to_lock);
  if (!guard.owns_lock()) return std::nullopt;
  const auto* place = static_cast<const std::byte*>(address);
  for (const auto& [base, allocation] : by_base_) {
    const bool is_near = allocation.pages != nullptr && place >= allocation.pages - kPageBytes &&
                         place < allocation.pages + allocation.page_bytes + kPageBytes;
    if (is_near) return allocation;
  }
  return std::nullopt;
}

Allocation Memory::remove(void* base, MemoryKind kind) {
  const std::lock_guard guard(mutex_);
  const auto place = by_base_.find(reinterpret_cast<uintptr_t>(base));
  if (place == by_base_.end() || place->second.kind != kind) {
    fail(kind == MemoryKind::kRegistered ? cudaErrorHostMemoryNotRegistered : cudaErrorInvalidValue,
         "no allocation of this kind starts at this address");
  }
  const Allocation allocation = place->second;
  by_base_.erase(place);
  return allocation;
}

void Memory::add(const Allocation& allocation) {
  const std::lock_guard guard(mutex_);
  by_base_[reinterpret_cast<uintptr_t>(allocation.base)] = allocation;
}

}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" cudaError_t cudaMalloc(void** address, size_t num_bytes) {
  return call([&] {
    check_device(current_device());
    refuse_while_capturing("cudaMalloc");
    *address = num_bytes == 0 ? nullptr : memory().allocate_device(current_device(), num_bytes);
  });
}

// Waits for the device, as the real one: who frees while kernels wait for each other stands still.
extern "C" cudaError_t cudaFree(void* address) {
  return call([&] {
    check_device(current_device());
    refuse_while_capturing("cudaFree");
    if (address == nullptr) return;
    const auto allocation = memory().find(address);
    require(allocation.has_value(), cudaErrorInvalidValue, "cudaFree of what was not allocated");
    wait_for_device(allocation->device);
    memory().free_device(address);
  });
}

// For tests: how many allocations go well before the one that fails; negative: none fails.
static std::atomic<int> num_before_failure{-1};
extern "C" void simulated_gpu_fail_host_allocation(int num_before) {
  num_before_failure = num_before;
}

extern "C" cudaError_t cudaHostAlloc(void** address, size_t num_bytes, unsigned) {
  return call([&] {
    check_device(current_device());
    require(num_before_failure < 0 || num_before_failure-- != 0, cudaErrorMemoryAllocation);
    refuse_while_capturing("cudaHostAlloc");
    *address = num_bytes == 0 ? nullptr : memory().allocate_host(num_bytes);
  });
}

extern "C" cudaError_t cudaFreeHost(void* address) {
  return call([&] {
    refuse_while_capturing("cudaFreeHost");
    if (address == nullptr) return;
    wait_for_all_devices();
    memory().free_host(address);
  });
}

extern "C" cudaError_t cudaHostRegister(void* address, size_t num_bytes, unsigned) {
  return call([&] {
    refuse_while_capturing("cudaHostRegister");
    memory().register_host(address, num_bytes);
  });
}

extern "C" cudaError_t cudaHostUnregister(void* address) {
  return call([&] {
    refuse_while_capturing("cudaHostUnregister");
    wait_for_all_devices();
    memory().unregister_host(address);
  });
}

extern "C" cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned) {
  return call([&] {
    const auto allocation = memory().find(on_host);
    require(allocation && !allocation->is_on_device(), cudaErrorInvalidValue,
            "this is not host memory that CUDA knows of");
    *on_device = on_host;
  });
}

extern "C" cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                const void* address) {
  return call([&] {
    check_device(current_device());
    const auto allocation = memory().find(address);
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    if (!allocation) {
      attributes->hostPointer = const_cast<void*>(address);
      return;
    }
    attributes->type = allocation->is_on_device() ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = allocation->device;
    attributes->devicePointer = const_cast<void*>(address);
    attributes->hostPointer = allocation->is_on_device() ? nullptr : const_cast<void*>(address);
  });
}
