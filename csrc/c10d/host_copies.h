// CUDA tensors whose collective goes through the memory of the host, where GPUs cannot be joined.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace rota::c10d_glue {

// Copies of tensors on the CPU, contiguous. Waits for the GPU.
class HostCopies {
 public:
  explicit HostCopies(at::TensorList tensors);

  const std::vector<at::Tensor>& tensors() const { return copies_; }
  // Into the first `num_tensors`, on their current stream.
  void copy_back(size_t num_tensors) const;
  void copy_back() const { copy_back(copies_.size()); }

 private:
  std::vector<at::Tensor> originals_;
  std::vector<at::Tensor> copies_;
};

}  // namespace rota::c10d_glue
