// What the reduction operations do to two elements, each of the accumulate dtype: one text for
// scalars, on the host and in CUDA kernels, and for GCC's vectors.
#pragma once

#include <type_traits>

#include "base/dtype.h"
#include "base/host_device.h"

namespace rota {

// Signed lanes of vectors wrap because what uses them is compiled with -fwrapv, signed scalars
// because they are added as unsigned ones: nvcc knows no such flag. A comparison with NaN is false,
// so the second test lets a NaN of either side through, as torch does.
template <DType dtype, ReduceOp op, typename V>
HOST_DEVICE_INLINE constexpr V combine(V a, V b) {
  constexpr bool is_bool = dtype == DType::kBool;
  if constexpr (op == ReduceOp::kMin) return (a < b) | (a != a) ? a : b;
  if constexpr (op == ReduceOp::kMax) return (a > b) | (a != a) ? a : b;
  if constexpr (op == ReduceOp::kBand) return a & b;
  if constexpr (op == ReduceOp::kBor || (op == ReduceOp::kSum && is_bool)) return a | b;
  if constexpr (op == ReduceOp::kBxor) return a ^ b;
  if constexpr (std::is_signed_v<V> && std::is_integral_v<V>) {
    using Unsigned = decltype(std::make_unsigned_t<V>{} + 0u);  // not promoted to int
    const auto combined = combine<dtype, op>(static_cast<Unsigned>(a), static_cast<Unsigned>(b));
    return static_cast<V>(combined);
  }
  if constexpr (op == ReduceOp::kProduct) return a * b;
  if constexpr (op == ReduceOp::kSum || op == ReduceOp::kAvg) return a + b;
}

}  // namespace rota
