// Where tensors may be cut. Results must not depend on it, or must do so in the same way on the CPU
// and on GPUs; so both cut at the same places.
#pragma once

#include <cstdint>

namespace rota {

// Plain tensors are cut at multiples of this many elements, which keeps shards of every dtype on
// cache lines.
inline constexpr uint64_t kGranuleElems = 64;

// Gradient buckets are worked on in tiles, whole blocks of every wire format: each is rounded by
// random numbers of its own, and its squares are a sum of their own, so that no result depends on
// algorithm, rounds, shards or channels. On the CPU one stays in the first-level cache.
inline constexpr uint64_t kTileElems = 512;

}  // namespace rota
