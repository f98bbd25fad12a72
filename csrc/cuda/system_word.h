// How kernels access words that other GPUs, or the host, access too: atomically, at system scope.
// One alias for the device and for the tests that run the kernels' bodies as threads of the host.
#pragma once

#if defined(__CUDACC__)
#include <cuda/atomic>
#else
#include <atomic>
#endif

namespace rota::cuda {

#if defined(__CUDACC__)
template <typename T>
using SystemWord = ::cuda::atomic_ref<T, ::cuda::thread_scope_system>;
using MemoryOrder = ::cuda::std::memory_order;
#else
template <typename T>
using SystemWord = std::atomic_ref<T>;
using MemoryOrder = std::memory_order;
#endif

}  // namespace rota::cuda
