// Parts of tensors as bytes, for collectives that copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/buffers.h"
#include "cpu/copy.h"
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

inline uint64_t total_of(const Call& call, const Part* parts, int num_parts) {
  uint64_t total = 0;
  for (int i = 0; i < num_parts; ++i) total += bytes_of(call, parts[i]);
  return total;
}

// Whether they lie one behind the other, without gaps.
inline bool are_one_tensor(const Call& call, const Part* parts, int num_parts) {
  const std::byte* end = at(*parts, 0);
  for (int i = 0; i < num_parts; ++i) {
    if (parts[i].data != end) return false;
    end += bytes_of(call, parts[i]);
  }
  return true;
}

// This rank's own part; an input may be where the output is.
inline void copy_own(const Call& call, const Part& from, const Part& to,
                     const OutputCopier& output) {
  if (from.data != to.data) output.copy(to.data, from.data, bytes_of(call, from));
}

}  // namespace rota::cpu
