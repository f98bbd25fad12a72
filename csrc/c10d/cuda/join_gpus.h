// Joins the GPUs of a communicator's ranks: memory that all map, and the proof that what a rank
// writes there arrives.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "core/communicator.h"
#include "transport/device_layout.h"
#include "transport/device_regions.h"

namespace rota::c10d_glue {

// On `device`, which is the current one. Collective, over `store` too; blocks. All kernels are
// loaded then. Throws Error(kTransport) on every rank where the GPUs cannot be joined.
transport::DeviceRegions join_gpus(Communicator& communicator,
                                   const c10::intrusive_ptr<::c10d::Store>& store,
                                   at::Device device, const transport::DeviceGeometry& geometry,
                                   CallerThread thread);

}  // namespace rota::c10d_glue
