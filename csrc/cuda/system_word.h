// Atomic access to shared words in kernels: SystemWord, at system scope, for words that other GPUs
// or the host also access; GpuWord, at device scope, for words that only this GPU's blocks access.
// Each alias serves both the device and the tests that run kernel bodies as host threads.
#pragma once

#include <cstdint>

#include "base/host_device.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

namespace rota::cuda {

#if defined(__CUDACC__)
template <typename T>
using SystemWord = ::cuda::atomic_ref<T, ::cuda::thread_scope_system>;
template <typename T>
using GpuWord = ::cuda::atomic_ref<T, ::cuda::thread_scope_device>;
using MemoryOrder = ::cuda::std::memory_order;
#else
template <typename T>
using SystemWord = std::atomic_ref<T>;
template <typename T>
using GpuWord = std::atomic_ref<T>;
using MemoryOrder = std::memory_order;
#endif

// Adds to a count of this GPU; publishes nothing else.
HOST_DEVICE inline void add_to_count(uint64_t& count, uint64_t value) {
  GpuWord<uint64_t>(count).fetch_add(value, MemoryOrder::relaxed);
}

}  // namespace rota::cuda
