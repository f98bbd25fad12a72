// Where tensors may be cut. The CPU and GPUs cut at the same places, so a result that depends on
// the cuts is the same on both.
#pragma once

#include <cstdint>

namespace rota {

// Plain tensors are cut at multiples of this many elements, which aligns shards of every dtype to
// cache lines.
inline constexpr uint64_t kGranuleElems = 64;

// Gradient buckets are processed in tiles, each a whole number of blocks in every wire format. A
// tile has its own random numbers and its own sum of squares, so no result depends on algorithm,
// rounds, shards or channels. On the CPU a tile fits in the L1 cache.
inline constexpr uint64_t kTileElems = 512;

}  // namespace rota
