// How each reduction operation combines two elements of the accumulate dtype. One implementation
// serves scalars, on the host and in CUDA kernels, and GCC's vectors.
#pragma once

#include <type_traits>

#include "base/dtype.h"
#include "base/host_device.h"

namespace rota {

// Signed integers wrap: vectors because their callers are compiled with -fwrapv, scalars because
// they are added as unsigned (nvcc has no such flag). Comparisons with NaN are false; the extra
// test a != a makes a NaN on either side propagate, as in torch.
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
