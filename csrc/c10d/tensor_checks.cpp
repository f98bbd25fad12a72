#include "c10d/tensor_checks.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace rota::c10d_glue {
namespace {

std::optional<DType> find_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kByte:
      return DType::kUInt8;
    case at::kChar:
      return DType::kInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kBool:
      return DType::kBool;
    default:  // torch's enum grows with every release
      return std::nullopt;
  }
}

std::string known_dtypes() {
  std::string names;
  for (const DTypeInfo& dtype : kDTypeInfo) names += join(names.empty() ? "" : ", ", dtype.name);
  return names;
}

// Whether no two elements can share memory: with dimensions in order of stride, each steps over all
// that the smaller ones span. Slices and transposes pass; expanded and interleaved views do not.
bool is_non_overlapping(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) != 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < span) return false;
    span = stride * (size - 1) + span;
  }
  return true;
}

}  // namespace

DType reducible_dtype(at::ScalarType dtype, std::string_view what) {
  if (const auto known = find_dtype(dtype)) return *known;
  throw Error(ErrorKind::kType, join("rota.all_reduce: ", what, " is ", c10::toString(dtype),
                                     ", expected one of ", known_dtypes()));
}

DType dtype_or_bytes(at::ScalarType dtype) { return find_dtype(dtype).value_or(DType::kUInt8); }

void check_tensor(const at::Tensor& tensor, std::string_view collective) {
  if (!tensor.defined()) {
    throw Error(ErrorKind::kType, join("rota.", collective, ": the tensor is undefined"));
  }
  if (tensor.layout() != at::kStrided) {
    throw Error(ErrorKind::kType, join("rota.", collective, ": the tensor's layout is ",
                                       tensor.layout(), "; call to_dense() first"));
  }
  if (!tensor.device().is_cpu()) {
    throw Error(ErrorKind::kType,
                join("rota.", collective, ": the tensor is on ", tensor.device().str(),
                     "; this version moves CPU tensors only, use NCCL for others"));
  }
  if (!tensor.is_contiguous() && !is_non_overlapping(tensor)) {
    throw Error(ErrorKind::kValue,
                join("rota.", collective,
                     ": elements of the tensor may share memory (an expanded tensor?); call "
                     "contiguous() first"));
  }
}

Packed::Packed(const at::Tensor& tensor, Content content)
    : tensor_(tensor),
      packed_(tensor.is_contiguous()      ? tensor
              : content == Content::kRead ? tensor.contiguous()
                                          : at::empty_like(tensor, at::MemoryFormat::Contiguous)) {}

}  // namespace rota::c10d_glue
