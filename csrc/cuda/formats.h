// Maps a format that is known at run time to the code compiled for it.
#pragma once

#include <type_traits>

#include "cuda/codec.h"
#include "cuda/collective_args.h"

namespace rota::cuda {

// Calls body(Codec<...>{}) for a format without scales; returns a null result if nothing is summed
// in the format.
template <typename Body>
auto with_plain_codec(const WireFormat& format, const Body& body) {
  using Result = decltype(body(Codec<DType::kFloat32>{}));
  if (format.is_block_scaled) return Result{};
  switch (format.dtype) {
    case DType::kFloat32:
      return body(Codec<DType::kFloat32>{});
    case DType::kFloat64:
      return body(Codec<DType::kFloat64>{});
    case DType::kFloat16:
      return body(Codec<DType::kFloat16>{});
    case DType::kBFloat16:
      return body(Codec<DType::kBFloat16>{});
    case DType::kFloat8E4M3:
      return body(Codec<DType::kFloat8E4M3>{});
    case DType::kFloat8E5M2:
      return body(Codec<DType::kFloat8E5M2>{});
    case DType::kUInt8:
      return body(Codec<DType::kUInt8>{});
    case DType::kInt8:
      return body(Codec<DType::kInt8>{});
    case DType::kInt16:
      return body(Codec<DType::kInt16>{});
    case DType::kInt32:
      return body(Codec<DType::kInt32>{});
    case DType::kInt64:
      return body(Codec<DType::kInt64>{});
    case DType::kBool:
      return body(Codec<DType::kBool>{});
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return Result{};
  }
  return Result{};
}

// The same, also for formats in scaled blocks.
template <typename Body>
auto with_codec(const WireFormat& format, const Body& body) {
  using Result = decltype(body(Codec<DType::kFloat32>{}));
  if (!format.is_block_scaled) return with_plain_codec(format, body);
  if (format.dtype == DType::kFloat16) {
    return body(Codec<DType::kFloat16, true>{});
  }
  if (format.dtype == DType::kFloat8E4M3) {
    return body(Codec<DType::kFloat8E4M3, true>{});
  }
  if (format.dtype == DType::kFloat8E5M2) {
    return body(Codec<DType::kFloat8E5M2, true>{});
  }
  return Result{};
}

// Calls body(SumsConstant<...>{}) for sums of a codec's elements; returns a null result for
// integers along a tree, since their sums are the same in any order.
template <Sums sums>
using SumsConstant = std::integral_constant<Sums, sums>;

template <typename Codec, typename Body>
auto with_sums(Sums sums, const Body& body) {
  using Result = decltype(body(SumsConstant<Sums::kInGroups>{}));
  if (sums == Sums::kInGroups) return body(SumsConstant<Sums::kInGroups>{});
  if constexpr (info(Codec::format().dtype).is_floating) {
    return body(SumsConstant<Sums::kInTree>{});
  }
  return Result{};
}

// Calls body(DTypeConstant<...>{}, Codec<...>{}) for the gradients' dtype and their wire format.
template <DType dtype>
using DTypeConstant = std::integral_constant<DType, dtype>;

template <typename Body>
auto with_bucket_formats(DType dtype, const WireFormat& wire, const Body& body) {
  using Result = decltype(body(DTypeConstant<DType::kFloat32>{}, Codec<DType::kFloat32>{}));
  const auto with_dtype = [&](auto dtype_constant) {
    return with_codec(wire, [&](auto codec) -> Result {
      if constexpr (is_wire_dtype(decltype(codec)::format().dtype)) {
        return body(dtype_constant, codec);
      } else {
        return Result{};
      }
    });
  };
  if (dtype == DType::kFloat32) return with_dtype(DTypeConstant<DType::kFloat32>{});
  if (dtype == DType::kFloat64) return with_dtype(DTypeConstant<DType::kFloat64>{});
  if (dtype == DType::kFloat16) return with_dtype(DTypeConstant<DType::kFloat16>{});
  if (dtype == DType::kBFloat16) return with_dtype(DTypeConstant<DType::kBFloat16>{});
  return Result{};
}

}  // namespace rota::cuda
