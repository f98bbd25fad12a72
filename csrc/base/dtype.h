// Element types and reduction operations: names, sizes, and which pairs make sense.
// Knows nothing of torch; tensor/ translates.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/host_device.h"

namespace rota {

// The dtypes that rota computes with, and some that it moves. moved_dtype() has a value for every
// other one, so that ranks whose dtypes differ notice it.
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

// A switch, because device code cannot read a table in host memory.
HOST_DEVICE constexpr DTypeInfo info(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {4, true, true, DType::kFloat32};
    case DType::kFloat64:
      return {8, true, true, DType::kFloat64};
    case DType::kFloat16:
      return {2, true, true, DType::kFloat32};
    case DType::kBFloat16:
      return {2, true, true, DType::kFloat32};
    case DType::kFloat8E4M3:
      return {1, true, true, DType::kFloat32};
    case DType::kFloat8E5M2:
      return {1, true, true, DType::kFloat32};
    case DType::kUInt8:
      return {1, true, false, DType::kUInt8};
    case DType::kInt8:
      return {1, true, false, DType::kInt8};
    case DType::kInt16:
      return {2, true, false, DType::kInt16};
    case DType::kInt32:
      return {4, true, false, DType::kInt32};
    case DType::kInt64:
      return {8, true, false, DType::kInt64};
    case DType::kBool:
      return {1, true, false, DType::kBool};
    case DType::kUInt16:
      return {2, false, false, DType::kUInt16};
    case DType::kUInt32:
      return {4, false, false, DType::kUInt32};
    case DType::kUInt64:
      return {8, false, false, DType::kUInt64};
    case DType::kComplex64:
      return {8, false, false, DType::kComplex64};
    case DType::kComplex128:
      return {16, false, false, DType::kComplex128};
  }
  // Of moved_dtype(): behind the switch, so that the others take no branch more.
  return {size_t{1} << (static_cast<uint16_t>(dtype) >> 8 & 7), false, false, dtype};
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

constexpr std::optional<ReduceOp> parse_reduce_op(std::string_view text) {
  for (size_t i = 0; i < kNumReduceOps; ++i) {
    if (kReduceOpNames[i] == text) return static_cast<ReduceOp>(i);
  }
  return std::nullopt;
}

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
