// Threads of a block, which the compiler is told for registers' sake. In a header of their own, so
// that nothing else of a launch, such as the tuning of it, has kernels compiled anew.
#pragma once

#include "base/limits.h"

namespace rota::cuda {

// Collectives may take 128 registers each, of which a multiprocessor has 65536; pack and unpack 96,
// so that several blocks share one: the more is in flight, the less of the latency of memory shows.
inline constexpr int kThreadsPerBlock = 512;
static_assert(kMaxWorldSize <= kThreadsPerBlock, "each rank has a thread of its own (links.h)");
inline constexpr int kBucketThreads = 128;
inline constexpr int kBucketBlocks = 5;  // on a multiprocessor, at least

}  // namespace rota::cuda
