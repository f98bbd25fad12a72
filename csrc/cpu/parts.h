// Parts of tensors as bytes, for collectives that copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/buffers.h"
#include "schedule/call.h"

namespace rota::cpu {

inline uint64_t bytes_of(const Call& call, const Part& part) {
  return part.num_elems * info(call.dtype).num_bytes;
}

inline std::byte* at(const Part& part, uint64_t offset) {
  return static_cast<std::byte*>(part.data) + offset;
}

inline uint64_t longest_of(const Call& call, const Part* parts, int num_parts) {
  uint64_t longest = 0;
  for (int i = 0; i < num_parts; ++i) {
    longest = schedule::max_of(longest, bytes_of(call, parts[i]));
  }
  return longest;
}

// This rank's own part. They may overlap, because the input of an in-place collective is a part of
// its output.
inline void move_own(const Call& call, const Part& from, const Part& to) {
  const uint64_t num_bytes = bytes_of(call, from);
  if (from.data != to.data && num_bytes != 0) std::memmove(to.data, from.data, num_bytes);
}

}  // namespace rota::cpu
