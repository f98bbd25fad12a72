#include "c10d/host_copies.h"

#include <ATen/core/grad_mode.h>

namespace rota::c10d_glue {

HostCopies::HostCopies(at::TensorList tensors) : originals_(tensors.vec()) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : originals_) copies_.push_back(tensor.contiguous().cpu());
}

void HostCopies::copy_back(size_t num_tensors) const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < num_tensors; ++i) originals_[i].copy_(copies_[i]);
}

}  // namespace rota::c10d_glue
