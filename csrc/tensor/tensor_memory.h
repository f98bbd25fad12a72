// The memory of tensors: whether it is there, whether two tensors share bytes of it, and whether
// something else may use it.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace rota::tensors {

// Throws Error(kType) for a tensor that has no memory (DTensor, a fake or functional tensor, ...),
// and Error(kValue) unless its storage holds all of its elements. Costs a few ns.
void check_memory(const at::Tensor& tensor, std::string_view call);

struct ByteRange {
  const std::byte* begin;
  const std::byte* end;
};

// An empty range overlaps none.
inline bool overlap(const ByteRange& one, const ByteRange& other) {
  return std::max(one.begin, other.begin) < std::min(one.end, other.end);
}

// From the first byte of a tensor to its last. Those between may be another's if it is strided.
ByteRange range_of(const at::Tensor& tensor);
// Whether the tensors have a byte in common, whatever storages they have.
bool overlap(const at::Tensor& one, const at::Tensor& other);

// Whether the memory may be used by its address, and not through `tensor`: by a view, a DLPack
// export, autograd, an operation that is pending. `tensor` is the only C++ reference, beside that
// of its Python object, which the caller knows of. counts_tensor: whether others count as such a
// use; if not, only other tensors and exports of the storage do.
bool may_be_held_elsewhere(const at::Tensor& tensor, bool counts_tensor);

}  // namespace rota::tensors
