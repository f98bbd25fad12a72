#include "numbers.h"

#include <cmath>

#include "reference.h"

namespace rota::test {
namespace {

int64_t small_integer(uint64_t hash, int64_t bound) {
  return static_cast<int64_t>(hash % static_cast<uint64_t>(2 * bound + 1)) - bound;
}

}  // namespace

int64_t exact_integer(DType dtype, ReduceOp op, int world_size, uint64_t hash) {
  if (dtype == DType::kBool) return static_cast<int64_t>(hash & 1);
  if (!info(dtype).is_floating) return static_cast<int64_t>(hash);
  const bool is_float8 = info(dtype).num_bytes == 1;
  switch (op) {
    case ReduceOp::kSum:
      return small_integer(hash, is_float8 ? 1 : 8);
    case ReduceOp::kAvg:
      return small_integer(hash, is_float8 ? 1 : 3) * world_size;
    case ReduceOp::kProduct:
      return (hash & 1 ? 1 : -1) * (hash & 2 ? 1 : 2);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return small_integer(hash, is_float8 ? 8 : 100);
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      break;
  }
  return 0;
}

uint64_t mixed_bits(DType dtype, uint64_t hash) {
  const uint64_t any = mix(hash);
  if (!info(dtype).is_floating) return bits_of_integer(dtype, static_cast<int64_t>(any));
  if (hash % 64 == 0) return any & (~uint64_t{0} >> (64 - 8 * info(dtype).num_bytes));
  const double mantissa = std::ldexp(static_cast<double>(any >> 11), -52) - 1;
  return round_to(dtype, std::ldexp(mantissa, static_cast<int>(hash % 8)));
}

}  // namespace rota::test
