// Element types and reduction operations: names, sizes, and which pairs make sense.
// Knows nothing of torch; tensor/ translates.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/host_device.h"

namespace rota {

// The dtypes that rota computes with, floats first, and some that it moves. moved_dtype() has a
// value for every other one, so that ranks whose dtypes differ notice it.
enum class DType : uint16_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  // no Inf: overflow becomes NaN, as in torch
  kFloat8E5M2,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  // Moved, never reduced.
  kUInt16,
  kUInt32,
  kUInt64,
  kComplex64,
  kComplex128,
};

enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

// A dtype of which only the size matters here: whoever names a dtype `number` means the same one.
// elem_bytes: a power of two of at most 16.
constexpr DType moved_dtype(uint8_t number, size_t elem_bytes) {
  return static_cast<DType>(0x8000 | std::countr_zero(elem_bytes) << 8 | number);
}
HOST_DEVICE constexpr bool is_moved_dtype(DType dtype) {
  return static_cast<uint16_t>(dtype) >= 0x8000;
}
HOST_DEVICE constexpr uint8_t moved_number(DType dtype) { return static_cast<uint8_t>(dtype); }

struct DTypeInfo {
  size_t num_bytes;
  bool is_reducible;
  bool is_floating;
  DType accumulate;  // sums are kept in this dtype
};

// The binary logarithm of each one's bytes, in 3 bits: device code cannot read a table in host
// memory, and a switch takes a jump, ten times in a small all_reduce.
inline constexpr uint64_t kLogBytes = [] {
  uint64_t packed = 0;
  int shift = 0;
  for (const uint64_t log : {2, 3, 1, 1, 0, 0, 0, 0, 1, 2, 3, 0, 1, 2, 3, 3, 4}) {
    packed |= log << shift;
    shift += 3;
  }
  return packed;
}();

HOST_DEVICE constexpr DTypeInfo info(DType dtype) {
  const auto number = static_cast<uint16_t>(dtype);
  const int log_bytes = is_moved_dtype(dtype) ? number >> 8 & 7 : kLogBytes >> 3 * number & 7;
  const bool is_narrow = DType::kFloat16 <= dtype && dtype <= DType::kFloat8E5M2;
  return {.num_bytes = size_t{1} << log_bytes,
          .is_reducible = dtype <= DType::kBool,
          .is_floating = dtype <= DType::kFloat8E5M2,
          .accumulate = is_narrow ? DType::kFloat32 : dtype};
}

// Whether it has NaN.
HOST_DEVICE constexpr bool has_nan(DType dtype) {
  return info(dtype).is_floating || dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

// As torch spells them.
inline constexpr std::array<std::string_view, 17> kDTypeNames{
    "float32", "float64", "float16", "bfloat16",  "float8_e4m3fn", "float8_e5m2",
    "uint8",   "int8",    "int16",   "int32",     "int64",         "bool",
    "uint16",  "uint32",  "uint64",  "complex64", "complex128"};
inline constexpr size_t kNumDTypes = kDTypeNames.size();

inline constexpr std::array<std::string_view, 8> kReduceOpNames{"sum", "avg",  "product", "min",
                                                                "max", "band", "bor",     "bxor"};
inline constexpr size_t kNumReduceOps = kReduceOpNames.size();

// Names those of moved_dtype(); tensor/ sets it, since their numbers are torch's.
using MovedName = std::string_view (*)(uint8_t number);
inline MovedName moved_name = [](uint8_t) -> std::string_view { return "a dtype without a name"; };

constexpr std::string_view name(DType dtype) {
  return is_moved_dtype(dtype) ? moved_name(moved_number(dtype))
                               : kDTypeNames[static_cast<size_t>(dtype)];
}
constexpr std::string_view name(ReduceOp op) { return kReduceOpNames[static_cast<size_t>(op)]; }

// Averages of bools and bitwise operations on floats are refused because the result has no meaning.
HOST_DEVICE constexpr bool is_defined(ReduceOp op, DType dtype) {
  if (!info(dtype).is_reducible) return false;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return true;
    case ReduceOp::kAvg:
      return dtype != DType::kBool;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return !info(dtype).is_floating;
  }
  return false;
}

}  // namespace rota
