// How a tensor is cut: chunks, shards, rounds. Integers only; the same code for the CPU loops, the
// CUDA kernels, step counts and tests.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace rota::schedule {

// A half-open range of elements [begin, begin + num_elems).
struct Range {
  uint64_t begin;
  uint64_t num_elems;
};

HOST_DEVICE constexpr uint64_t ceil_div(uint64_t value, uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

HOST_DEVICE constexpr uint64_t min_of(uint64_t a, uint64_t b) { return a < b ? a : b; }
HOST_DEVICE constexpr uint64_t max_of(uint64_t a, uint64_t b) { return a < b ? b : a; }

// The chunk `index` when chunks hold `chunk_elems` each; the last one may be short.
HOST_DEVICE constexpr Range chunk_of(uint64_t num_elems, uint64_t chunk_elems, uint64_t index) {
  const uint64_t begin = min_of(index * chunk_elems, num_elems);
  return {begin, min_of(chunk_elems, num_elems - begin)};
}

// The length of a shard when `num_elems` elements are cut into `num_shards` equal parts, rounded up
// to `granule` elements so that shards start aligned; the last ones may be short or empty. The host
// computes it and passes it to kernels, because a 64-bit division costs a GPU about a hundred
// instructions.
HOST_DEVICE constexpr uint64_t shard_length(uint64_t num_elems, uint64_t num_shards,
                                            uint64_t granule) {
  return ceil_div(ceil_div(num_elems, num_shards), granule) * granule;
}

// The shard `index` when shards are `shard_elems` long.
HOST_DEVICE constexpr Range shard_of(uint64_t num_elems, uint64_t shard_elems, int index) {
  return chunk_of(num_elems, shard_elems, static_cast<uint64_t>(index));
}

// Chunk `index` of `shard`, counted from the start of the tensor. Past the shard's end the chunk is
// empty; protocols treat it like any other.
HOST_DEVICE constexpr Range chunk_of_shard(uint64_t num_elems, uint64_t shard_elems, int shard,
                                           uint64_t chunk_elems, uint64_t index) {
  const Range whole = shard_of(num_elems, shard_elems, shard);
  const Range chunk = chunk_of(whole.num_elems, chunk_elems, index);
  return {whole.begin + chunk.begin, chunk.num_elems};
}

// The same as shard_of(), given the number of shards instead of their length.
HOST_DEVICE constexpr Range even_shard(uint64_t num_elems, uint64_t num_shards, uint64_t index,
                                       uint64_t granule) {
  return chunk_of(num_elems, shard_length(num_elems, num_shards, granule), index);
}

// Returns the chunk count of the longest shard. chunk_elems: a multiple of `granule`.
HOST_DEVICE constexpr uint64_t num_chunks_of_shards(uint64_t num_elems, int num_shards,
                                                    uint64_t chunk_elems, uint64_t granule) {
  const Range longest = even_shard(num_elems, static_cast<uint64_t>(num_shards), 0, granule);
  return ceil_div(longest.num_elems, chunk_elems);
}

HOST_DEVICE constexpr Range chunk_of_even_shard(uint64_t num_elems, int num_shards, int shard,
                                                uint64_t chunk_elems, uint64_t index,
                                                uint64_t granule) {
  const uint64_t shard_elems = shard_length(num_elems, static_cast<uint64_t>(num_shards), granule);
  return chunk_of_shard(num_elems, shard_elems, shard, chunk_elems, index);
}

}  // namespace rota::schedule
