// Whether the kernels of this build give the CPU's bits on a GPU. The first use of a GPU on a
// machine finds out; what fails is not used. Ranks of one launch on the one GPU stand in for
// processes, so that no peer is needed, and none can be at fault.
#pragma once

#include <ATen/core/Tensor.h>

#include "tensor/cuda/unusable_kernels.h"
#include "tensor/gpu_self_test.h"

namespace rota::tensors {

// Throws Error(kValue) unless the environment's ROTA_GPU_SELF_TEST is one of once, always, never.
void check_self_test_setting();

// What must not be used on `device`, which is the current one: as this process knows already, as
// the record says, or as a test finds now, which ROTA_GPU_SELF_TEST decides. Blocks for at most
// the deadlines of self_test.cpp. Throws Error(kTransport) where a kernel has not come to an end:
// nothing runs on this GPU then, in this process. Throws likewise what torch's allocator does, and
// what the handler of a signal raises; the next call tries again.
UnusableKernels find_unusable_kernels(at::Device device);

// Prints which kernels are not used, once in the life of this process.
void warn_of_unusable_kernels(at::Device device, const UnusableKernels& unusable);

}  // namespace rota::tensors
