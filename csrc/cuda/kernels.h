// Which compiled kernel does what: each of these is defined in the .cu file of its name, and gives
// what cudaLaunchKernel takes, or null for a format that the kernel is not made for.
#pragma once

#include "base/dtype.h"
#include "base/wire_format.h"
#include "cuda/block_threads.h"

// In front of a kernel's name: what the compiler may count on, for registers' sake.
#define ROTA_COLLECTIVE_KERNEL __global__ __launch_bounds__(kThreadsPerBlock, 1) void
#define ROTA_PACK_KERNEL __global__ __launch_bounds__(kBucketThreads, kBucketBlocks) void
// With 80 registers a thread, one block more shares a multiprocessor.
#define ROTA_UNPACK_KERNEL __global__ __launch_bounds__(kBucketThreads, kBucketBlocks + 1) void

namespace rota::cuda {

const void* all_gather_kernel_of(const WireFormat& format);
const void* broadcast_kernel_of(const WireFormat& format);
const void* hierarchical_kernel_of(const WireFormat& format);
const void* low_latency_kernel_of(const WireFormat& format);
const void* one_shot_kernel_of(const WireFormat& format);
const void* ordered_ring_kernel_of(const WireFormat& format);
const void* reduce_scatter_kernel_of(const WireFormat& format);
const void* ring_kernel_of(const WireFormat& format);
const void* transfer_kernel_of(const WireFormat& format);
const void* two_shot_in_place_kernel_of(const WireFormat& format);
const void* two_shot_kernel_of(const WireFormat& format);

// dtype: of the gradients.
const void* pack_kernel_of(DType dtype, const WireFormat& wire);
const void* unpack_kernel_of(DType dtype, const WireFormat& wire);

}  // namespace rota::cuda
