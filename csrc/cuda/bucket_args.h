// The arguments of pack and unpack, the kernels for gradient buckets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/tile.h"
#include "cuda/scalar.h"
#include "cuda/words.h"
#include "schedule/chunk.h"

namespace rota::cuda {

// Part of a list of gradients. Each tensor starts a new tile, so that accesses stay aligned; the
// last tile of a tensor may be short.
struct alignas(16) Tile {
  std::byte* data;
  uint64_t num_elems;

  // Whether it has all its elements, where threads can move 16 bytes at once: elements of 4 bytes
  // may start anywhere (cuda/tiles.h).
  HOST_DEVICE bool is_whole(size_t elem_bytes) const {
    return num_elems == kTileElems && is_aligned(data, elem_bytes == 4 ? elem_bytes : kAccessBytes);
  }
};

// A team is kTeamThreads neighbouring threads that work on rows of a tile together (cuda/tiles.h);
// a warp is four teams.
inline constexpr uint32_t kTeamThreads = 8;
inline constexpr uint32_t kTeams = 4;
inline constexpr uint32_t kWarpThreads = kTeams * kTeamThreads;

// Gradients and their buffer in the wire format, in whole tiles.
struct BucketArgs {
  const Tile* tiles;  // of a list of tensors; null: the one tensor is `contiguous`
  Tile contiguous;    // of any length
  uint64_t num_tiles;
  std::byte* wire;  // num_tiles * kTileElems elements, aligned to 16 bytes
  float contribution_factor;
  float result_factor;

  HOST_DEVICE uint64_t num_elems() const { return num_tiles * kTileElems; }
  HOST_DEVICE Tile tile(uint64_t index, size_t elem_bytes) const {
    if (tiles != nullptr) return tiles[index];
    const uint64_t first = index * kTileElems;
    return {contiguous.data + first * elem_bytes,
            schedule::min_of(kTileElems, contiguous.num_elems - first)};
  }
};

// Counters that the blocks of unpack share. Both are 0 at rest: pack zeroes them, because the
// memory may be new, and unpack leaves them at 0.
struct UnpackWords {
  uint64_t num_non_finite;
  uint32_t num_blocks_done;

  HOST_DEVICE void put_to_rest() {
    num_non_finite = 0;
    num_blocks_done = 0;
  }
};

struct PackArgs {
  BucketArgs bucket;
  // Error feedback (Seide et al. 2014): a float for each element, in units of the result, which is
  // added to the contribution and then updated; or null. A tile's begin where those of the tiles
  // before it would end if all were whole; what would complete a tile is not touched.
  float* residual;
  Rounding rounding;
  UnpackWords* words;  // of the unpack that follows
};

struct UnpackArgs {
  BucketArgs bucket;
  double* squares;  // one per group of tiles (base/fixed_tree.h), aligned to 16 bytes
  double* stats;    // of all tiles: number of non-finite results, sum of squares
  UnpackWords* words;
};

}  // namespace rota::cuda
