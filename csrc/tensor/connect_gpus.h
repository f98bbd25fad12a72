// The door to tensor/cuda/, which a build for the CPU lacks (without_cuda.cpp).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "core/communicator.h"
#include "tensor/collectives.h"

namespace rota::tensors {

// Whether what this thread queues on its current stream of `device` goes into a graph.
bool is_capturing(at::Device device);

// Collective, over `store` too; blocks. Every rank's tensors are to be on the device that it names
// here. staging does what no kernel of this GPU can be trusted with. Throws Error(kTransport) where
// this build, or this machine, has nothing for it.
std::unique_ptr<Collectives> connect_gpus(std::shared_ptr<Communicator> communicator,
                                          const c10::intrusive_ptr<::c10d::Store>& store,
                                          at::Device device, CallerThread thread,
                                          std::unique_ptr<Collectives> staging);

}  // namespace rota::tensors
