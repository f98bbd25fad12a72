// memcpy that accepts empty ranges.
#pragma once

#include <cstddef>
#include <cstring>

namespace rota::cpu {

// An empty tensor has a null pointer, which memcpy does not allow.
inline void copy_bytes(void* dst, const void* src, size_t num_bytes) {
  if (num_bytes != 0) std::memcpy(dst, src, num_bytes);
}

}  // namespace rota::cpu
