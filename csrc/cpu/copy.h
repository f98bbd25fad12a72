// Copies of bytes: into memory that is read again soon, and into the outputs of collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rota::cpu {

// An empty tensor has a null pointer, which memcpy does not allow.
inline void copy_bytes(void* dst, const void* src, size_t num_bytes) {
  if (num_bytes != 0) std::memcpy(dst, src, num_bytes);
}

// Stores past the caches where the processor can. The ranges must not overlap.
void stream_bytes(void* dst, const void* src, size_t num_bytes);

// How a copy stores: into this core's caches, or past them (cpu/slot_stores.h).
enum class StorePath : uint8_t { kCached, kStreamed };

inline void store_bytes(StorePath path, void* dst, const void* src, size_t num_bytes) {
  if (path == StorePath::kStreamed) return stream_bytes(dst, src, num_bytes);
  copy_bytes(dst, src, num_bytes);
}

// Whether a copy of this length should go past the caches: neither its source nor its destination
// would stay in the last one.
bool streams(uint64_t num_bytes);

// Copies into a call's outputs. A call whose tensors exceed the last-level cache streams them: the
// caller would not find them in a cache anyway, and an ordinary store first reads the line that it
// overwrites (csrc/README.md).
class OutputCopier {
 public:
  // num_bytes: of one rank's outputs.
  OutputCopier(uint64_t num_bytes, int world_size);
  // Copies a message, which its receiver reads next and which only one rank outputs: streams
  // it only if it alone exceeds the last-level cache (benchmarks/LOG.md).
  static OutputCopier for_message(uint64_t num_bytes);

  void copy(void* dst, const void* src, size_t num_bytes) const {
    if (streams_) return stream_bytes(dst, src, num_bytes);
    copy_bytes(dst, src, num_bytes);
  }

 private:
  explicit OutputCopier(bool streams) : streams_(streams) {}

  bool streams_;
};

}  // namespace rota::cpu
