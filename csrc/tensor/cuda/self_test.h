// Tests whether the kernels of this build give the CPU's bits on a GPU. Runs at the first use of a
// GPU on a machine; if one kernel fails, none is used. The ranks are local ranks of one launch on
// that GPU, so no peer is needed, and none can be at fault.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tensor/gpus.h"

namespace rota::tensors {

// Throws Error(kValue) unless ROTA_GPU_SELF_TEST is unset or one of once, always, never.
void check_self_test_setting();

// What is wrong with the kernels on `device`, which is the current one; empty: nothing.
// ROTA_GPU_SELF_TEST decides how that is found: from what this process already knows, from the
// record, or by a test now. Blocks for at most the deadlines of self_test.cpp. Throws
// Error(kTransport) if a kernel has not finished. Also throws what torch's allocator throws and
// what a signal's handler raises; after these, the next call tries again.
std::string find_wrong_kernels(at::Device device);

}  // namespace rota::tensors
