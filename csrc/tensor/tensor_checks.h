// Checks on tensors, and packing of strided ones.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace rota::tensors {

// The names of the dtypes for which is_usable holds, as torch spells them.
std::vector<std::string_view> dtype_names(bool (*is_usable)(DType));

// The dtype of a torch tensor; throws Error(kType) naming those that can be used.
DType known_dtype(at::ScalarType dtype, std::string_view collective, std::string_view what,
                  bool (*is_usable)(DType));
DType reducible_dtype(at::ScalarType dtype, std::string_view collective,
                      std::string_view what = "the tensor's dtype");
// The same for collectives that only move bytes, which take whatever torch stores, except quantized
// tensors.
DType movable_dtype(const at::Tensor& tensor, std::string_view collective);
// The tensor itself, or its memory as integers where it has a dtype that torch may be unable to
// copy. What copies elements before they are moved, or after it, copies this.
at::Tensor as_copyable(const at::Tensor& tensor);

// Elements per block of a block-scaled wire dtype; throws Error for a dtype without scales.
uint32_t block_elems(at::ScalarType wire_dtype);

// Throws Error(kType) unless it is a dense CPU or CUDA tensor with memory (tensor_memory.h), and
// Error(kValue) if it is on another device, if its elements overlap or, on a GPU, if it is
// misaligned.
void check_tensor(const at::Tensor& tensor, std::string_view collective,
                  at::Device device = at::kCPU);

uint64_t num_elems(const at::Tensor& tensor);
uint64_t num_bytes(const at::Tensor& tensor);

// A tensor, which must outlive this, and the contiguous memory that holds its values: its own, or
// that of a copy.
class Packed {
 public:
  enum class Content { kRead, kOverwritten };

  // factor: multiplies the values that are read, in a copy.
  Packed(const at::Tensor& tensor, Content content, std::optional<double> factor = std::nullopt);

  const at::Tensor& tensor() const { return packed_.defined() ? packed_ : tensor_; }
  void* data() const { return tensor().data_ptr(); }
  // Uses a copy from now on, because the tensor's own memory is another's at the same time.
  void set_aside();
  // Copies a copy back into the tensor.
  void unpack() const;

 private:
  const at::Tensor& tensor_;
  Content content_;
  at::Tensor packed_;  // undefined if the tensor itself is used
};

}  // namespace rota::tensors
