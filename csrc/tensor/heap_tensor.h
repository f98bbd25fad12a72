// Tensors that peers can read in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace rota::tensors {

// Returns a contiguous CPU tensor of zeroes in this process's heap (transport/heap.h). Throws
// Error(kTransport) if memory is short, Error(kValue) for a negative size.
at::Tensor make_heap_tensor(at::IntArrayRef size, at::ScalarType dtype);

// Moves the tensor's storage to the heap unless it lies there, for all tensors that share it, as
// torch.Tensor.share_memory_() does. Throws Error(kValue) if its memory is not torch's own.
void move_to_heap(const at::Tensor& tensor, std::string_view call);

}  // namespace rota::tensors
