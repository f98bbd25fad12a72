// Tensors that peers can read where they lie.
#pragma once

#include <ATen/core/Tensor.h>

namespace rota::tensors {

// A CPU tensor of zeroes, contiguous, in this process's heap (transport/heap.h). Throws
// Error(kTransport) if memory is short, Error(kValue) for a negative size.
at::Tensor make_heap_tensor(at::IntArrayRef size, at::ScalarType dtype);

}  // namespace rota::tensors
