// Regions that ranks write into, by torch's symmetric memory: memory that is mapped page by page,
// which also joins GPUs whose processes may not hand CUDA's handles to each other.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/device_regions.h"

namespace rota::tensors {

// Collective, over `store`. Throws Error(kTransport) on every rank where it cannot be: GPUs that
// several ranks share are among the reasons, unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
transport::DeviceRegions connect_by_symmetric_memory(const c10::intrusive_ptr<::c10d::Store>& store,
                                                     int rank, int world_size, at::Device device,
                                                     size_t num_bytes,
                                                     const transport::AllGatherText& all_gather);

}  // namespace rota::tensors
