// How kernels access words that others access too, atomically: at system scope what other GPUs or
// the host read or write, at the GPU's what only its own blocks do. Each is one alias for the
// device and for the tests that run the kernels' bodies as threads of the host.
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

// To a count of this GPU that says nothing of anything else.
HOST_DEVICE inline void add_to_count(uint64_t& count, uint64_t value) {
  GpuWord<uint64_t>(count).fetch_add(value, MemoryOrder::relaxed);
}

}  // namespace rota::cuda
