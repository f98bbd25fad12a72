// Checksums of memory, computed while it is copied: of two positions that differ, or a line that
// is missing or twice, a checksum differs almost surely. Not for secrets.
//
// Fletcher's sums (1982) over 64-bit words in as many lanes as a cache line has words: two
// additions per word, which hide behind the memory traffic of a copy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rota::cpu {

uint64_t checksum(const void* data, size_t num_bytes);

// Copies, and returns the checksum of what was copied. Large copies go past the caches. The ranges
// must not overlap.
uint64_t copy_with_checksum(void* dst, const void* src, size_t num_bytes);

}  // namespace rota::cpu
