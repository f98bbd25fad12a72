// Memory for the data that is on its way between hosts, kept from call to call.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace rota::hosts {

// What memory for elements starts at a multiple of, as the element loops like it.
inline constexpr size_t kPlaceBytes = 64;

struct FreePlaces {
  void operator()(std::byte* bytes) const {
    ::operator delete(bytes, std::align_val_t{kPlaceBytes});
  }
};
using AlignedBytes = std::unique_ptr<std::byte, FreePlaces>;
inline AlignedBytes aligned_bytes(size_t num_bytes) {
  return AlignedBytes(
      static_cast<std::byte*>(::operator new(num_bytes, std::align_val_t{kPlaceBytes})));
}

class Scratch {
 public:
  static constexpr size_t round_up(size_t num_bytes) {
    return (num_bytes + kPlaceBytes - 1) / kPlaceBytes * kPlaceBytes;
  }

  // The buffer of this number, with room for num_bytes. Invalidates what an earlier call has
  // returned for it.
  std::byte* at_least(size_t number, size_t num_bytes) {
    if (number >= buffers_.size()) buffers_.resize(number + 1);
    Buffer& buffer = buffers_[number];
    if (buffer.num_bytes < num_bytes) {
      buffer = {};
      buffer = {aligned_bytes(num_bytes), num_bytes};
    }
    return buffer.bytes.get();
  }

 private:
  struct Buffer {
    AlignedBytes bytes;
    size_t num_bytes = 0;
  };

  std::vector<Buffer> buffers_;
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

}  // namespace rota::hosts
