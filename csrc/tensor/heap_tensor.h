// Tensors that peers can read in place.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

namespace rota::tensors {

// Returns a contiguous CPU tensor of zeroes in this process's heap (transport/heap.h). Throws
// Error(kTransport) if memory is short, Error(kValue) for a negative size.
at::Tensor make_heap_tensor(at::IntArrayRef size, at::ScalarType dtype);

// Such tensors in memory that is used again: for buffers that come and go in the same few lengths.
// New pages of the heap must be zeroed and mapped by every rank, which takes longer than a
// collective that uses them.
class HeapPool {
 public:
  HeapPool();

  // Returns a contiguous CPU tensor of any values. Its memory comes back when the last tensor that
  // shares it is gone. Throws as make_heap_tensor().
  at::Tensor empty(int64_t num_elems, at::ScalarType dtype);

 private:
  struct Idle;
  std::shared_ptr<Idle> idle_;
};

// Both of these free the memory that a tensor had, so they move only what nothing else may use:
// may_be_held_elsewhere() (tensor_memory.h), of the only C++ reference beside that of the tensor's
// Python object. Operations that are pending hold a reference to the storage.

// Moves the tensor's storage to the heap unless it lies there. Throws Error(kValue) if its memory
// is not torch's own, or may be held elsewhere; of the tensor itself: if counts_tensor.
void move_to_heap(const at::Tensor& tensor, std::string_view call, bool counts_tensor);

// Moves the tensor's storage onto the bytes of another tensor, which then live as long as either.
// copies: the contents, too; otherwise the storage takes those that it finds. Returns false, and
// does nothing, if the memory is not torch's own and this has not moved it before, or if it may be
// held elsewhere; a tensor that requires a gradient may, since torch's own code holds it and no
// other library can. Throws Error(kValue) unless `place` is contiguous and as long, Error(kType) if
// the tensor has no memory.
bool move_storage(const at::Tensor& tensor, const at::Tensor& place, bool copies);

}  // namespace rota::tensors
