// What the kernels of gradient buckets, pack and unpack, are told.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/tile.h"
#include "cuda/scalar.h"
#include "cuda/words.h"
#include "schedule/chunk.h"

namespace rota::cuda {

// Part of a list of gradients: each tensor starts a tile of its own, so that what is read and
// written stays aligned, and the last tile of each may be short.
struct alignas(16) Tile {
  std::byte* data;
  uint64_t num_elems;

  HOST_DEVICE bool is_whole() const {
    return num_elems == kTileElems && is_aligned(data, kAccessBytes);
  }
};

// Neighbours that work on rows of a tile together (cuda/tiles.h), and the four teams of them that a
// warp is.
inline constexpr uint32_t kTeamThreads = 8;
inline constexpr uint32_t kTeams = 4;
inline constexpr uint32_t kWarpThreads = kTeams * kTeamThreads;

// Gradients and their place in the wire format, in whole tiles.
struct BucketArgs {
  const Tile* tiles;  // of a list of tensors; null for the one that `contiguous` is
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

// What blocks of unpack count together. Both are 0 at rest: pack sets them so, for memory that is
// new, and unpack leaves them so.
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
  // Error feedback (Seide et al. 2014): num_elems() floats in units of the result, which are added
  // to the contributions and renewed; or null.
  float* residual;
  Rounding rounding;
  UnpackWords* words;  // of the unpack that comes after
};

struct UnpackArgs {
  BucketArgs bucket;
  double* squares;  // by group of tiles (base/fixed_tree.h), aligned to 16 bytes
  double* stats;    // of all tiles: number of non-finite results, sum of their squares
  UnpackWords* words;
};

}  // namespace rota::cuda
