// Inputs for tests: integers whose reductions are exact, and numbers of every kind. They are
// functions of a hash, so that every rank knows every other's.
#pragma once

#include "base/dtype.h"
#include "random.h"

namespace rota::test {

constexpr uint64_t hash(uint64_t seed, int rank, uint64_t elem) {
  return mix(mix(seed + static_cast<uint64_t>(rank)) + elem);
}

// Up to 8 ranks, every partial result of floats is an integer that the dtype holds exactly, of at
// most 8 bits (float8: 3). Integer dtypes take any value and wrap.
int64_t exact_integer(DType dtype, ReduceOp op, int world_size, uint64_t hash);

// The bits of a number whose sums are rounded: mostly of moderate magnitude, sometimes random bits,
// so including NaN, Inf and denormals.
uint64_t mixed_bits(DType dtype, uint64_t hash);

}  // namespace rota::test
