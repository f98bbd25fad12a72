// Looks up compiled kernels. Each function is defined in the .cu file of its name or in
// copy_kernels.cu, and returns what cudaLaunchKernel takes, or null if the kernel is not compiled
// for the format.
#pragma once

#include "base/dtype.h"
#include "base/wire_format.h"
#include "cuda/block_threads.h"
#include "cuda/collective_args.h"

// Go before a kernel's name: the launch bounds, from which the compiler allots registers.
#define ROTA_COLLECTIVE_KERNEL __global__ __launch_bounds__(kThreadsPerBlock, 1) void
#define ROTA_SUM_KERNEL(sums) __global__ __launch_bounds__(most_threads(sums), 1) void
#define ROTA_BUCKET_KERNEL __global__ __launch_bounds__(kBucketThreads, kBucketBlocks) void

namespace rota::cuda {

const void* all_gather_kernel_of(const WireFormat& format);
const void* broadcast_kernel_of(const WireFormat& format);
const void* hierarchical_kernel_of(const WireFormat& format);
const void* low_latency_kernel_of(const WireFormat& format, Sums sums);
const void* one_shot_kernel_of(const WireFormat& format, Sums sums);
const void* ordered_ring_kernel_of(const WireFormat& format);
const void* reduce_scatter_kernel_of(const WireFormat& format, Sums sums);
const void* ring_kernel_of(const WireFormat& format);
const void* transfer_kernel_of(const WireFormat& format);
const void* two_shot_in_place_kernel_of(const WireFormat& format, Sums sums);
const void* two_shot_kernel_of(const WireFormat& format, Sums sums);

// dtype: of the gradients.
const void* pack_kernel_of(DType dtype, const WireFormat& wire);
const void* unpack_kernel_of(DType dtype, const WireFormat& wire);

}  // namespace rota::cuda
