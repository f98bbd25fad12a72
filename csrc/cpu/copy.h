// Copying bytes, none included.
#pragma once

#include <cstddef>
#include <cstring>

namespace rota::cpu {

// A tensor without elements has a null pointer, which memcpy must not be given.
inline void copy_bytes(void* dst, const void* src, size_t num_bytes) {
  if (num_bytes != 0) std::memcpy(dst, src, num_bytes);
}

}  // namespace rota::cpu
