// The entry to tensor/cuda/; CPU builds use without_cuda.cpp instead.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "core/communicator.h"
#include "tensor/collectives.h"

namespace rota::tensors {

// Whether this thread's current stream on `device` is being captured into a CUDA graph.
bool is_capturing(at::Device device);

// Collective, also over `store`; blocks. Each rank's tensors must be on the device it passes.
// `staging` runs operations whose kernels failed the self-test. Throws Error(kTransport) if this
// build or machine does not support it.
std::unique_ptr<Collectives> connect_gpus(std::shared_ptr<Communicator> communicator,
                                          const c10::intrusive_ptr<::c10d::Store>& store,
                                          at::Device device, CallerThread thread,
                                          std::unique_ptr<Collectives> staging);

}  // namespace rota::tensors
