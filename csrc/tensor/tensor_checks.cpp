#include "tensor/tensor_checks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/wire_format.h"
#include "tensor/tensor_memory.h"

namespace rota::tensors {
namespace {

// By DType.
constexpr std::array<at::ScalarType, kNumDTypes> kTorchDTypes{
    at::kFloat,  at::kDouble, at::kHalf,   at::kBFloat16,     at::kFloat8_e4m3fn, at::kFloat8_e5m2,
    at::kByte,   at::kChar,   at::kShort,  at::kInt,          at::kLong,          at::kBool,
    at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat, at::kComplexDouble};

std::optional<DType> find_dtype(at::ScalarType dtype) {
  const auto found = std::ranges::find(kTorchDTypes, dtype);
  if (found == kTorchDTypes.end()) return std::nullopt;
  return static_cast<DType>(found - kTorchDTypes.begin());
}

// Torch's names of all its dtypes.
std::string_view torch_name(uint8_t number) {
  constexpr auto kNumTypes = static_cast<size_t>(at::ScalarType::NumOptions);
  static const auto names = [] {
    std::array<std::string, kNumTypes> names;
    for (size_t i = 0; i < kNumTypes; ++i) {
      const auto type = static_cast<at::ScalarType>(i);
      if (type != at::ScalarType::Undefined) names[i] = c10::getDtypeNames(type).first;
    }
    return names;
  }();
  return number < kNumTypes ? names[number] : std::string_view("a dtype of another torch");
}
[[maybe_unused]] const MovedName names_are_torchs = moved_name = torch_name;

// Whether no two elements can share memory: with dimensions sorted by stride, each stride covers
// the span of the smaller dimensions. Slices and transposes pass; expanded and interleaved views do
// not.
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

void check_alignment(const at::Tensor& tensor, std::string_view collective) {
  const void* data = tensor.const_data_ptr();
  if (reinterpret_cast<uintptr_t>(data) % tensor.element_size() == 0) return;
  throw Error(ErrorKind::kValue,
              join("rota.", collective, ": a tensor of ", c10::toString(tensor.scalar_type()),
                   " starts at ", data, ", which is no multiple of its ", tensor.element_size(),
                   " bytes; call clone() first"));
}

}  // namespace

std::vector<std::string_view> dtype_names(bool (*is_usable)(DType)) {
  std::vector<std::string_view> names;
  for (size_t i = 0; i < kNumDTypes; ++i) {
    if (is_usable(static_cast<DType>(i))) names.push_back(kDTypeNames[i]);
  }
  return names;
}

DType known_dtype(at::ScalarType dtype, std::string_view collective, std::string_view what,
                  bool (*is_usable)(DType)) {
  const auto known = find_dtype(dtype);
  if (known && is_usable(*known)) return *known;
  std::string expected;
  for (const std::string_view name : dtype_names(is_usable)) {
    expected += join(expected.empty() ? "" : ", ", name);
  }
  throw Error(ErrorKind::kType, join("rota.", collective, ": ", what, " is ", c10::toString(dtype),
                                     ", expected one of ", expected));
}

DType reducible_dtype(at::ScalarType dtype, std::string_view collective, std::string_view what) {
  return known_dtype(dtype, collective, what,
                     [](DType candidate) { return info(candidate).is_reducible; });
}

DType movable_dtype(const at::Tensor& tensor, std::string_view collective) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (const auto known = find_dtype(dtype)) return *known;
  if (c10::isQIntType(dtype)) {
    throw Error(ErrorKind::kType,
                join("rota.", collective, ": the tensor is quantized (", c10::toString(dtype),
                     "), and its scales would not travel; move int_repr() and the scales"));
  }
  return moved_dtype(static_cast<uint8_t>(dtype), c10::elementSize(dtype));
}

at::Tensor as_copyable(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  // Torch copies complex numbers, and those may be lazily conjugated.
  if (find_dtype(dtype) || c10::isComplexType(dtype)) return tensor;
  if (tensor.element_size() == 1) return tensor.view(at::kByte);
  return tensor.element_size() == 2 ? tensor.view(at::kShort) : tensor;
}

uint32_t block_elems(at::ScalarType wire_dtype) {
  return block_scaling(known_dtype(wire_dtype, "reduce_bucket", "wire_dtype", has_block_scaling))
      .block_elems;
}

void check_tensor(const at::Tensor& tensor, std::string_view collective, at::Device device) {
  if (!tensor.defined()) {
    throw Error(ErrorKind::kType, join("rota.", collective, ": the tensor is undefined"));
  }
  if (tensor.layout() != at::kStrided) {
    throw Error(ErrorKind::kType, join("rota.", collective, ": the tensor's layout is ",
                                       tensor.layout(), "; call to_dense() first"));
  }
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    throw Error(ErrorKind::kType,
                join("rota.", collective, ": the tensor is on ", tensor.device().str(),
                     ", expected one on the CPU or a CUDA device"));
  }
  check_memory(tensor, collective);
  if (tensor.device() != device) {
    throw Error(ErrorKind::kValue,
                join("rota.", collective, ": a tensor is on ", tensor.device().str(),
                     ", expected all on ", device.str(), "; move them there"));
  }
  if (tensor.is_cuda()) check_alignment(tensor, collective);
  if (!tensor.is_contiguous() && !is_non_overlapping(tensor)) {
    throw Error(ErrorKind::kValue,
                join("rota.", collective,
                     ": elements of the tensor may share memory (an expanded tensor?); call "
                     "contiguous() first"));
  }
}

uint64_t num_elems(const at::Tensor& tensor) { return static_cast<uint64_t>(tensor.numel()); }

uint64_t num_bytes(const at::Tensor& tensor) { return num_elems(tensor) * tensor.element_size(); }

Packed::Packed(const at::Tensor& tensor, Content content, std::optional<double> factor)
    : tensor_(tensor), content_(content) {
  if (factor) {
    const at::NoGradGuard no_grad;
    packed_ = tensor.contiguous().mul(*factor);
    return;
  }
  // The memory of a lazily negated or conjugated view does not hold the view's values.
  if (!tensor.is_contiguous() || tensor.is_neg() || tensor.is_conj()) set_aside();
}

void Packed::set_aside() {
  if (packed_.defined()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor source = as_copyable(tensor_);
  packed_ = at::empty_like(source, at::MemoryFormat::Contiguous);
  if (content_ == Content::kRead) packed_.copy_(source);
}

void Packed::unpack() const {
  if (!packed_.defined()) return;
  // Inference mode is the caller's, and this may be another thread. It comes first, since to leave
  // it turns gradients on.
  const c10::InferenceMode as_caller(tensor_.is_inference());
  const at::NoGradGuard no_grad;
  as_copyable(tensor_).copy_(packed_);
}

}  // namespace rota::tensors
