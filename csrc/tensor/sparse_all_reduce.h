// The sum of sparse tensors on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "tensor/operation.h"

namespace rota::tensors {

// Throws Error(kType) or Error(kValue) for a tensor that is not a sparse COO tensor of the CPU.
void check_sparse(const at::Tensor& tensor);

// Gathers all ranks' elements and adds those of one place in ascending rank. Ranks may have
// elements in different places, but the tensors' sizes must be equal. run: runs an operation of
// dense tensors, in this thread.
void all_reduce_sparse(const at::Tensor& tensor, int rank, int world_size,
                       const std::function<void(Operation&)>& run);

}  // namespace rota::tensors
