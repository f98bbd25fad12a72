// Memory for the data that is on its way between hosts, kept from call to call.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace rota::tensors {

class Scratch {
 public:
  // What two neighbours in a buffer start at a multiple of.
  static constexpr size_t kPlaceBytes = 64;
  static constexpr size_t round_up(size_t num_bytes) {
    return (num_bytes + kPlaceBytes - 1) / kPlaceBytes * kPlaceBytes;
  }

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

// The places of one buffer, one after the other.
class Places {
 public:
  // num_bytes: of all, each rounded up.
  Places(Scratch& scratch, size_t number, size_t num_bytes)
      : next_(scratch.at_least(number, num_bytes)) {}
  std::byte* take(size_t num_bytes) {
    return std::exchange(next_, next_ + Scratch::round_up(num_bytes));
  }

 private:
  std::byte* next_;
};

}  // namespace rota::tensors
