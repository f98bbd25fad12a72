// Tensors that peers can read in place, in memory that is used again: for buffers that come and go
// in the same few lengths. New pages of the heap (heap_tensor.h) must be zeroed and mapped by every
// rank, which takes longer than a collective that uses them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace rota::tensors {

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

}  // namespace rota::tensors
