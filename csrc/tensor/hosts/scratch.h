// Memory for the data that is on its way between hosts, kept from call to call.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <vector>

namespace rota::tensors {

class Scratch {
 public:
  // The buffer of this number, 64-byte aligned, with room for num_bytes. Invalidates what an
  // earlier call has returned for it.
  std::byte* at_least(size_t number, size_t num_bytes) {
    if (number >= buffers_.size()) buffers_.resize(number + 1);
    at::Tensor& buffer = buffers_[number];
    if (!buffer.defined() || buffer.nbytes() < num_bytes) {
      buffer = at::empty({static_cast<int64_t>(num_bytes)}, at::kByte);
    }
    return static_cast<std::byte*>(buffer.data_ptr());
  }

 private:
  std::vector<at::Tensor> buffers_;
};

}  // namespace rota::tensors
