// Joins the GPUs of a communicator's ranks: one tuning for all, the proof that kernels compute what
// they should there, memory that all map, and the proof that what a rank writes there arrives.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "core/communicator.h"
#include "core/joined_regions.h"
#include "schedule/tuning.h"
#include "tensor/cuda/unusable_kernels.h"
#include "transport/device_layout.h"

namespace rota::tensors {

// The row for the current GPUs of all ranks, the same on each. Collective; blocks. Throws
// Error(kTransport) on every rank where one cannot ask about its GPU.
schedule::Tuning agree_on_tuning(Communicator& communicator, CallerThread thread);

struct JoinedGpus {
  std::unique_ptr<JoinedRegions> regions;
  UnusableKernels unusable;  // the same kernels on all ranks
};

// On `device`, which is the current one. Collective, over `store` too; blocks. All kernels are
// loaded then. Throws Error(kTransport) on every rank where the GPUs cannot be joined, or where the
// self-test of one did not come to an end.
JoinedGpus join_gpus(Communicator& communicator, const c10::intrusive_ptr<::c10d::Store>& store,
                     at::Device device, const schedule::Tuning& tuning,
                     const transport::DeviceGeometry& geometry, CallerThread thread);

}  // namespace rota::tensors
