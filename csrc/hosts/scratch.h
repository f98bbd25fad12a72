// Memory for the data that is on its way between hosts, kept from call to call.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace rota::hosts {

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
    Buffer& buffer = buffers_[number];
    if (buffer.num_bytes < num_bytes) {
      buffer = {};
      buffer.bytes.reset(static_cast<std::byte*>(::operator new(num_bytes, kAlignment)));
      buffer.num_bytes = num_bytes;
    }
    return buffer.bytes.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{kPlaceBytes};
  struct Release {
    void operator()(std::byte* bytes) const { ::operator delete(bytes, kAlignment); }
  };
  struct Buffer {
    std::unique_ptr<std::byte, Release> bytes;
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
