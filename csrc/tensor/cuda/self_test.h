// Tests whether the kernels of this build give the CPU's bits on a GPU. Runs at the first use of a
// GPU on a machine; kernels that fail are not used. The ranks are local ranks of one launch on that
// GPU, so no peer is needed, and none can be at fault.
#pragma once

#include <ATen/core/Tensor.h>

#include "tensor/cuda/unusable_kernels.h"
#include "tensor/gpu_self_test.h"

namespace rota::tensors {

// Throws Error(kValue) unless ROTA_GPU_SELF_TEST is unset or one of once, always, never.
void check_self_test_setting();

// The kernels that must not be used on `device`, which is the current one. ROTA_GPU_SELF_TEST
// decides how they are found: from what this process already knows, from the record, or by a test
// now. Blocks for at most the deadlines of self_test.cpp. Throws Error(kTransport) if a kernel has
// not finished: this process then runs nothing on this GPU. Also throws what torch's allocator
// throws and what a signal's handler raises; after these, the next call tries again.
UnusableKernels find_unusable_kernels(at::Device device);

// Prints which kernels are not used, once per process.
void warn_of_unusable_kernels(at::Device device, const UnusableKernels& unusable);

}  // namespace rota::tensors
