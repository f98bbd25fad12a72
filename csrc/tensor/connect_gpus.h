// The entry to tensor/cuda/; CPU builds use without_cuda.cpp instead.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "core/communicator.h"
#include "tensor/collectives.h"
#include "tensor/cpu_collectives.h"
#include "tensor/hosts/bridged_collectives.h"
#include "tensor/hosts/torch_connections.h"

namespace rota::tensors {

// Whether this thread's current stream on `device` is being captured into a CUDA graph.
bool is_capturing(at::Device device);

// Collective, also over `store`; blocks. Each rank's tensors must be on the device it passes.
// Throws Error(kTransport) if this build or machine does not support it, or a GPU fails the
// self-test.
std::unique_ptr<Collectives> connect_gpus(std::shared_ptr<Communicator> communicator,
                                          const c10::intrusive_ptr<::c10d::Store>& store,
                                          at::Device device, CallerThread thread);

// The same for ranks on several hosts, over `store` of them all. engine: carries CUDA tensors
// between hosts. Where a host's GPUs cannot be joined, what it returns stages, on all ranks. Throws
// Error(kTransport) on every rank if the engine does not work.
std::unique_ptr<Collectives> connect_gpus_of_hosts(BridgedCollectives& bridged, CpuCollectives& cpu,
                                                   const c10::intrusive_ptr<::c10d::Store>& store,
                                                   at::Device device, const BackendPtr& engine);

}  // namespace rota::tensors
