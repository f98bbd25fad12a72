// Windows on GPUs: memory on each rank's GPU that the others of its host map. Their words, and the
// signals on them, are in a window on the CPU, which also tells who still maps the memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <vector>

#include "tensor/window.h"
#include "transport/device_regions.h"

namespace rota::tensors {

// All ranks' memory by rank, uint8 and zeroes, num_bytes (at least 1) each. own, others: the
// windows on the CPU, others null for this rank. Keeps `own`'s memory until no rank maps it, which
// a rank does as long as it has a tensor of another rank or a view of one.
//
// Collective, also over `store`. Throws Error(kTransport) on every rank if a rank fails.
std::vector<at::Tensor> map_device_windows(const std::shared_ptr<ExposedTensor>& own,
                                           const std::vector<std::shared_ptr<OpenedTensor>>& others,
                                           int rank, const c10::intrusive_ptr<::c10d::Store>& store,
                                           at::Device device, size_t num_bytes,
                                           const transport::AllGatherText& all_gather);

}  // namespace rota::tensors
