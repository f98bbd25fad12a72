// Regions that ranks write into, in torch's symmetric memory. It maps memory page by page, which
// also joins GPUs whose processes may not exchange CUDA IPC handles.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/device_regions.h"

namespace rota::tensors {

// Collective, over `store`. Throws Error(kTransport) on every rank if it fails, for example because
// several ranks share a GPU without TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
transport::DeviceRegions connect_by_symmetric_memory(const c10::intrusive_ptr<::c10d::Store>& store,
                                                     int rank, int world_size, at::Device device,
                                                     size_t num_bytes,
                                                     const transport::AllGatherText& all_gather);

}  // namespace rota::tensors
