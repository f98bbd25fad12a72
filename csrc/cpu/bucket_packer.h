// One rank's contribution to the sum of a gradient bucket, tile by tile: multiplied, with what
// error feedback adds, and rounded to the wire format.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/tile.h"
#include "cpu/buffers.h"
#include "cpu/element_loops.h"
#include "schedule/chunk.h"

namespace rota::cpu {

struct alignas(64) TileFloats {
  float values[kTileElems];
};

// A tile in the wire format, sized for the widest dtype and the shortest blocks.
struct alignas(64) EncodedTile {
  std::byte payload[kTileElems * sizeof(float)];
  std::byte scales[kTileElems / block_scaling(DType::kFloat8E4M3).block_elems];

  WirePlace place() { return {payload, scales}; }
};

// Which tile it is, for its random numbers (base/random_bits.h).
struct TileKey {
  int stream;
  uint64_t number;
};

// 1 / divisor if that is exact, so that a product rounds as the quotient would; otherwise 1, and
// the sums are divided.
float exact_factor(float divisor);
void divide_unless_exact(float* sums, size_t num_elems, float divisor);
// Measures a tile of results.
void measure(BucketMeasures& measures, uint64_t tile, const float* results, size_t num_elems);

class BucketPacker {
 public:
  BucketPacker(const Call& call, const Buffers& buffers, int rank);

  // tile: in elements of the bucket.
  void pack(const schedule::Range& tile, uint64_t number, const WirePlace& wire) const;
  // Rounds with the call's random numbers, if it has any.
  void encode(const float* src, const WirePlace& wire, size_t num_elems, float factor,
              const TileKey& key) const;

 private:
  const std::byte* data_;
  DType dtype_;
  BucketPass pass_;
  float* residual_;
  int rank_;
  const ElementLoops& loops_;
  const WireLoops& wire_loops_;
};

}  // namespace rota::cpu
