// all_gather and broadcast of CUDA tensors over several hosts. Every byte crosses between two hosts
// once; the GPUs of a host share it.
#pragma once

#include "cpu/buffers.h"
#include "tensor/cuda/host_gpus.h"

namespace rota::tensors {

// Gathers equal parts. buffers: one input, and an output for each rank.
void all_gather_over_hosts(HostGpus& gpus, const Call& call, const cpu::Buffers& buffers);

// bytes: of the tensor; those of the root become everybody's. The root's host sends to all others.
void broadcast_over_hosts(HostGpus& gpus, const Call& call, const at::Tensor& bytes);

}  // namespace rota::tensors
