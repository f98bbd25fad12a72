// Element types and reduction operations: names, sizes, and which pairs make sense.
// Knows nothing of torch; c10d/ translates.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace rota {

enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  // without Inf: what is too large becomes NaN, as in torch
  kFloat8E5M2,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  // Moved by broadcast and all_gather, never reduced.
  kUInt16,
  kUInt32,
  kUInt64,
  kComplex64,
  kComplex128,
};

enum class ReduceOp : uint8_t { kSum, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor };

struct DTypeInfo {
  std::string_view name;  // as torch spells it
  size_t num_bytes;
  bool is_reducible;
  bool is_floating;
  DType accumulate;  // what sums are kept in
};

inline constexpr std::array<DTypeInfo, 17> kDTypeInfo{{
    {"float32", 4, true, true, DType::kFloat32},
    {"float64", 8, true, true, DType::kFloat64},
    {"float16", 2, true, true, DType::kFloat32},
    {"bfloat16", 2, true, true, DType::kFloat32},
    {"float8_e4m3fn", 1, true, true, DType::kFloat32},
    {"float8_e5m2", 1, true, true, DType::kFloat32},
    {"uint8", 1, true, false, DType::kUInt8},
    {"int8", 1, true, false, DType::kInt8},
    {"int16", 2, true, false, DType::kInt16},
    {"int32", 4, true, false, DType::kInt32},
    {"int64", 8, true, false, DType::kInt64},
    {"bool", 1, true, false, DType::kBool},
    {"uint16", 2, false, false, DType::kUInt16},
    {"uint32", 4, false, false, DType::kUInt32},
    {"uint64", 8, false, false, DType::kUInt64},
    {"complex64", 8, false, false, DType::kComplex64},
    {"complex128", 16, false, false, DType::kComplex128},
}};
inline constexpr size_t kNumDTypes = kDTypeInfo.size();

inline constexpr std::array<std::string_view, 8> kReduceOpNames{"sum", "avg",  "product", "min",
                                                                "max", "band", "bor",     "bxor"};
inline constexpr size_t kNumReduceOps = kReduceOpNames.size();

constexpr const DTypeInfo& info(DType dtype) { return kDTypeInfo[static_cast<size_t>(dtype)]; }
constexpr std::string_view name(DType dtype) { return info(dtype).name; }
constexpr std::string_view name(ReduceOp op) { return kReduceOpNames[static_cast<size_t>(op)]; }

constexpr std::optional<ReduceOp> parse_reduce_op(std::string_view text) {
  for (size_t i = 0; i < kNumReduceOps; ++i) {
    if (kReduceOpNames[i] == text) return static_cast<ReduceOp>(i);
  }
  return std::nullopt;
}

// An average of integers has no exact value in its own dtype, and bits of a float have no meaning
// as a number: both are refused rather than answered with a surprise.
constexpr bool is_defined(ReduceOp op, DType dtype) {
  if (!info(dtype).is_reducible) return false;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return true;
    case ReduceOp::kAvg:
      return info(dtype).is_floating;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return !info(dtype).is_floating;
  }
  return false;
}

}  // namespace rota
