// Joins the GPUs of a communicator's ranks: agrees on one tuning, tests the kernels, maps memory on
// all ranks, and verifies that what a rank writes there arrives.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>

#include "core/communicator.h"
#include "core/joined_regions.h"
#include "schedule/tuning.h"
#include "transport/device_layout.h"
#include "transport/device_regions.h"

namespace rota::tensors {

// Memory on each rank's GPU that all ranks map, by the means that ROTA_PEER_MEMORY names, or by the
// first of the two that works. `device` must be the current one. Collective, also over `store`.
// Throws Error(kTransport) on every rank if a rank fails.
transport::DeviceRegions connect_regions(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                         int world_size, at::Device device, size_t num_bytes,
                                         const transport::AllGatherText& all_gather);

// The tuning for the current GPUs of all ranks, the same on each. Collective; blocks. Throws
// Error(kTransport) on every rank if one cannot query its GPU.
schedule::Tuning agree_on_tuning(Communicator& communicator, CallerThread thread);

// Runs body on every rank. Collective; blocks. Throws Error(kTransport) on every rank if it throws
// on any.
void agree(Communicator& communicator, CallerThread thread, const std::function<void()>& body);

// `device` must be the current one. Collective, also over `store`; blocks. Loads all kernels.
// Throws Error(kTransport) on every rank if the GPUs cannot be joined, or if one fails the
// self-test.
std::unique_ptr<JoinedRegions> join_gpus(Communicator& communicator,
                                         const c10::intrusive_ptr<::c10d::Store>& store,
                                         at::Device device, const schedule::Tuning& tuning,
                                         const transport::DeviceGeometry& geometry,
                                         CallerThread thread);

}  // namespace rota::tensors
