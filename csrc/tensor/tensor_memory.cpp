#include "tensor/tensor_memory.h"

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"

namespace rota::tensors {
namespace {

// From the first byte to the last.
uint64_t span_bytes(const at::Tensor& tensor) {
  const int64_t num_elems = tensor.numel();
  if (num_elems == 0) return 0;
  int64_t span = num_elems;
  if (!tensor.is_contiguous()) {
    span = 1;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      span += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
  }
  return static_cast<uint64_t>(span) * tensor.element_size();
}

// How much of the storage a tensor with memory needs.
uint64_t end_of(const at::Tensor& tensor) {
  const uint64_t span = span_bytes(tensor);
  if (span == 0) return 0;
  return static_cast<uint64_t>(tensor.storage_offset()) * tensor.element_size() + span;
}

// What a tensor is that has no memory, and what to pass instead.
std::string without_memory(const at::Tensor& tensor) {
  using c10::DispatchKey;
  const c10::DispatchKeySet keys = tensor.key_set();
  if (keys.has(DispatchKey::Python)) {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::object object = pybind11::cast(tensor);
    return join("the tensor is of type ", Py_TYPE(object.ptr())->tp_name,
                ", which has no memory of its own; pass ",
                pybind11::hasattr(object, "to_local") ? "its .to_local()"
                                                      : "the plain tensor that it stands for");
  }
  if (keys.has(DispatchKey::ZeroTensor)) {
    return "the tensor is a zero tensor without memory; call clone() first";
  }
  return "the tensor has no memory, as inside of torch.func transforms, functionalization and "
         "tracing; pass the plain tensor that it stands for";
}

// A part of the distance between a byte of one tensor and one of another: a multiple of `bytes`,
// from low to high.
struct Step {
  int64_t bytes, low, high;
};

// The steps to all bytes of `one`, and from all of `other`; by descending bytes, which all differ.
std::vector<Step> steps_between(const at::Tensor& one, const at::Tensor& other) {
  std::map<int64_t, Step, std::greater<>> steps;
  const auto add = [&](int64_t bytes, int64_t low, int64_t high) {
    if (low == high) return;
    Step& step = steps.try_emplace(bytes, Step{bytes, 0, 0}).first->second;
    step.low += low;
    step.high += high;
  };
  const auto add_all = [&](const at::Tensor& tensor, bool is_from) {
    const auto num_bytes = static_cast<int64_t>(tensor.element_size());
    const auto add_up_to = [&](int64_t bytes, int64_t last) {
      is_from ? add(bytes, -last, 0) : add(bytes, 0, last);
    };
    add_up_to(1, num_bytes - 1);
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      add_up_to(tensor.stride(dim) * num_bytes, tensor.size(dim) - 1);
    }
  };
  add_all(one, /*is_from=*/false);
  add_all(other, /*is_from=*/true);
  std::vector<Step> sorted;
  for (const auto& [bytes, step] : steps) sorted.push_back(step);
  return sorted;
}

// Whether the steps can add up to the distance. What the later ones can add leaves few multiples of
// the first: two or three, where dimensions are nested as in views of one tensor.
bool can_add_up(int64_t distance, c10::ArrayRef<Step> steps) {
  if (steps.empty()) return distance == 0;
  const auto [bytes, low, high] = steps[0];
  const auto later = steps.slice(1);
  int64_t least = 0, most = 0;
  for (const Step& step : later) {
    least += step.low * step.bytes;
    most += step.high * step.bytes;
  }
  int64_t multiple = std::max(low, (distance - most) / bytes - 1);
  for (; multiple <= high && distance - multiple * bytes >= least; ++multiple) {
    if (can_add_up(distance - multiple * bytes, later)) return true;
  }
  return false;
}

}  // namespace

void check_memory(const at::Tensor& tensor, std::string_view call) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.has_storage()) {
    c10::StorageImpl& storage = *impl.unsafe_storage().unsafeGetStorageImpl();
    // Other ways to look at the pointer raise for a fake tensor.
    const bool is_null = storage._mutable_data_ptr_no_checks().get() == nullptr;
    // Nearly all tensors, and half the instructions of the next line.
    if (!is_null && tensor.is_contiguous() &&
        static_cast<uint64_t>(impl.storage_offset() + impl.numel()) * impl.itemsize() <=
            storage.nbytes()) {
      return;
    }
    if (!is_null && end_of(tensor) <= storage.nbytes()) return;
    // A wrapper's number of elements may be a symbol, which is no number.
    if (!impl.key_set().has(c10::DispatchKey::Python)) {
      const uint64_t end = end_of(tensor);
      if (end == 0) return;
      if (end > storage.nbytes()) {
        throw Error(ErrorKind::kValue,
                    join("rota.", call, ": the tensor's elements end at byte ", end,
                         " of its storage, which has ", storage.nbytes(),
                         "; its memory was freed or resized: allocate it again first"));
      }
    }
  }
  throw Error(ErrorKind::kType, join("rota.", call, ": ", without_memory(tensor)));
}

ByteRange range_of(const at::Tensor& tensor) {
  const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {begin, begin + span_bytes(tensor)};
}

bool overlap(const at::Tensor& one, const at::Tensor& other) {
  const ByteRange range = range_of(one), other_range = range_of(other);
  if (!overlap(range, other_range)) return false;
  if (one.is_contiguous() && other.is_contiguous()) return true;
  return can_add_up(other_range.begin - range.begin, steps_between(one, other));
}

bool may_be_held_elsewhere(const at::Tensor& tensor, bool counts_tensor) {
  const pybind11::gil_scoped_acquire gil;
  // Each is the one Python object of what it stands for, and holds it.
  const pybind11::object object = pybind11::cast(tensor);
  const pybind11::object storage = object.attr("untyped_storage")();
  return tensor.storage().use_count() > 2 || (counts_tensor && tensor.use_count() > 2);
}

}  // namespace rota::tensors
