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

// Moves the tensor's storage onto the bytes of another tensor, which then live as long as either,
// for all tensors that share the storage. copies: the contents, too; otherwise the storage takes
// those that it finds. Returns false, and does nothing, if the memory is not torch's own and this
// has not moved it before. Throws Error(kValue) unless `place` is contiguous and as long.
bool move_storage(const at::Tensor& tensor, const at::Tensor& place, bool copies);

}  // namespace rota::tensors
