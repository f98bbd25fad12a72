// From a format that is known at run time to the kernel that was compiled for it.
#pragma once

#include <type_traits>

#include "cuda/codec.h"

namespace rota::cuda {

// kernel_of(Codec<...>{}) for a format without scales; null where nothing is summed in it.
template <typename KernelOf>
const void* with_plain_codec(const WireFormat& format, const KernelOf& kernel_of) {
  if (format.is_block_scaled) return nullptr;
  switch (format.dtype) {
    case DType::kFloat32:
      return kernel_of(Codec<DType::kFloat32>{});
    case DType::kFloat64:
      return kernel_of(Codec<DType::kFloat64>{});
    case DType::kFloat16:
      return kernel_of(Codec<DType::kFloat16>{});
    case DType::kBFloat16:
      return kernel_of(Codec<DType::kBFloat16>{});
    case DType::kFloat8E4M3:
      return kernel_of(Codec<DType::kFloat8E4M3>{});
    case DType::kFloat8E5M2:
      return kernel_of(Codec<DType::kFloat8E5M2>{});
    case DType::kUInt8:
      return kernel_of(Codec<DType::kUInt8>{});
    case DType::kInt8:
      return kernel_of(Codec<DType::kInt8>{});
    case DType::kInt16:
      return kernel_of(Codec<DType::kInt16>{});
    case DType::kInt32:
      return kernel_of(Codec<DType::kInt32>{});
    case DType::kInt64:
      return kernel_of(Codec<DType::kInt64>{});
    case DType::kBool:
      return kernel_of(Codec<DType::kBool>{});
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return nullptr;
  }
  return nullptr;
}

// And for formats in scaled blocks.
template <typename KernelOf>
const void* with_codec(const WireFormat& format, const KernelOf& kernel_of) {
  if (!format.is_block_scaled) return with_plain_codec(format, kernel_of);
  if (format.dtype == DType::kFloat16) {
    return kernel_of(Codec<DType::kFloat16, true>{});
  }
  if (format.dtype == DType::kFloat8E4M3) {
    return kernel_of(Codec<DType::kFloat8E4M3, true>{});
  }
  if (format.dtype == DType::kFloat8E5M2) {
    return kernel_of(Codec<DType::kFloat8E5M2, true>{});
  }
  return nullptr;
}

// kernel_of(DTypeConstant<...>{}, Codec<...>{}) for what gradients are and what they travel as.
template <DType dtype>
using DTypeConstant = std::integral_constant<DType, dtype>;

template <typename KernelOf>
const void* with_bucket_formats(DType dtype, const WireFormat& wire, const KernelOf& kernel_of) {
  const auto with_dtype = [&](auto dtype_constant) {
    return with_codec(wire, [&](auto codec) -> const void* {
      if constexpr (is_wire_dtype(decltype(codec)::format().dtype)) {
        return kernel_of(dtype_constant, codec);
      } else {
        return nullptr;
      }
    });
  };
  if (dtype == DType::kFloat32) return with_dtype(DTypeConstant<DType::kFloat32>{});
  if (dtype == DType::kFloat64) return with_dtype(DTypeConstant<DType::kFloat64>{});
  if (dtype == DType::kFloat16) return with_dtype(DTypeConstant<DType::kFloat16>{});
  if (dtype == DType::kBFloat16) return with_dtype(DTypeConstant<DType::kBFloat16>{});
  return nullptr;
}

}  // namespace rota::cuda
