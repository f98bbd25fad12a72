// Sums of CUDA tensors over several hosts (level_sums.h says of which), in the order and with the
// roundings of hosts/hierarchical_sum.cpp, hence with the same bits: partial sums of a host in the
// accumulate dtype, one rounding to the wire format, the sum over the hosts at its owner in the
// accumulate dtype, and one more rounding.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/buffers.h"
#include "hosts/reducers.h"
#include "tensor/cuda/host_gpus.h"

namespace rota::tensors {

// This rank's part of an all_reduce or a reduce_bucket; every rank's tensor becomes the sum.
// tensor: contiguous, of one dimension. residual, stats: of a bucket; null: none.
void all_reduce_over_hosts(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
                           const at::Tensor& tensor, float* residual = nullptr,
                           double* stats = nullptr);

// This rank's part of a reduce_scatter with equal parts.
void reduce_scatter_over_hosts(HostGpus& gpus, const Call& call, const hosts::LevelOrders& orders,
                               const cpu::Buffers& buffers, at::ScalarType type);

}  // namespace rota::tensors
