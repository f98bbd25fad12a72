// Threads per block, which the compiler must know to allot registers. In a separate header, so that
// other changes to launches, such as tuning, do not recompile kernels.
#pragma once

#include "base/limits.h"
#include "cuda/sums.h"

namespace rota::cuda {

// A multiprocessor has 65536 registers. Threads of collectives may use 128 each, those of pack and
// unpack 96, so that several of their blocks share a multiprocessor: more loads in flight hide more
// memory latency.
inline constexpr int kThreadsPerBlock = 512;
// Sums along a tree may use 255: a thread has more pending sums than others have registers.
inline constexpr int kTreeThreads = 256;
static_assert(kMaxWorldSize <= kTreeThreads, "each rank has a thread of its own (links.h)");
inline constexpr int kBucketThreads = 128;
inline constexpr int kBucketBlocks = 5;  // per multiprocessor, at least

// The most threads of a block; of a collective that does not sum, kInGroups.
constexpr int most_threads(Sums sums) {
  return sums == Sums::kInTree ? kTreeThreads : kThreadsPerBlock;
}

}  // namespace rota::cuda
