// Tensors that peers can read in place.
#pragma once

#include <ATen/core/Tensor.h>

namespace rota::tensors {

// Returns a contiguous CPU tensor of zeroes in this process's heap (transport/heap.h). Throws
// Error(kTransport) if memory is short, Error(kValue) for a negative size.
at::Tensor make_heap_tensor(at::IntArrayRef size, at::ScalarType dtype);

}  // namespace rota::tensors
