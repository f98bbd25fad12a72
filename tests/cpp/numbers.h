// What tests put into tensors: integers whose reductions are exact, and numbers that leave nothing
// out. Functions of a hash, so that every rank knows every other's.
#pragma once

#include "base/dtype.h"
#include "random.h"

namespace rota::test {

constexpr uint64_t hash(uint64_t seed, int rank, uint64_t elem) {
  return mix(mix(seed + static_cast<uint64_t>(rank)) + elem);
}

// Up to 8 ranks every partial result of floats is an integer that the dtype holds exactly: of at
// most 8 bits, or, for float8, of at most 3; integers take any value and wrap.
int64_t exact_integer(DType dtype, ReduceOp op, int world_size, uint64_t hash);

// The bits of a number whose sums are rounded: mostly of moderate magnitude, and now and then any
// bits there are, so NaN, Inf and denormals.
uint64_t mixed_bits(DType dtype, uint64_t hash);

}  // namespace rota::test
