#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "tensor/cuda/bucket_memory.h"
#include "tensor/cuda/gpu_classes.h"
#include "tensor/cuda/native_stream.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {
namespace {

[[noreturn]] void refuse_bucket(const std::string& what) {
  throw Error(ErrorKind::kValue, "rota.GradientBucket: " + what);
}

void check_gradient(const at::Tensor& gradient, const at::Tensor& first, size_t index) {
  check_tensor(gradient, "GradientBucket", first.device());
  if (!gradient.is_contiguous()) refuse_bucket(join("gradient ", index, " is not contiguous"));
  if (gradient.scalar_type() != first.scalar_type()) {
    refuse_bucket(join("gradient ", index, " is of ", c10::toString(gradient.scalar_type()),
                       ", the first of ", c10::toString(first.scalar_type()),
                       "; make a bucket for each dtype"));
  }
}

// Packs gradients into a wire buffer in one launch, and unpacks them in another: what the fused
// hook does around its all-reduce, for use with another all-reduce.
class GradientBucket {
 public:
  // gradients: contiguous, of one float dtype, on one GPU; their memory must stay where it is.
  // Copies the list of their addresses to the GPU, and waits for that.
  GradientBucket(Tensors gradients, at::ScalarType wire_dtype, bool block_scaling);

  // One launch each, on the current stream. Throw Error.
  void pack(float contribution_factor, const std::optional<at::Tensor>& residual,
            std::optional<uint64_t> stochastic_seed);
  void unpack(float result_factor);

  at::Tensor wire() const;  // uint8[num_wire_bytes]
  at::Tensor stats() const { return stats_; }
  uint64_t num_bytes() const { return num_bytes_; }
  uint64_t num_elems() const { return num_tiles_ * kTileElems; }

 private:
  cuda::BucketArgs args(float contribution_factor, float result_factor) const;

  Tensors gradients_;
  DType dtype_;
  WireFormat wire_;
  uint64_t num_bytes_ = 0;
  uint64_t num_tiles_ = 0;
  at::Tensor tiles_;  // cuda::Tile[num_tiles_], as uint8
  std::optional<BucketMemory> memory_;
  at::Tensor stats_;
};

GradientBucket::GradientBucket(Tensors gradients, at::ScalarType wire_dtype, bool block_scaling)
    : gradients_(std::move(gradients)) {
  if (gradients_.empty()) refuse_bucket("the list of gradients is empty");
  const at::Tensor& first = gradients_[0];
  if (!first.defined() || !first.is_cuda()) {
    refuse_bucket(
        "the first gradient is not on a GPU; CPU gradients are packed on their way, by "
        "Communicator.reduce_bucket");
  }
  dtype_ =
      known_dtype(first.scalar_type(), "GradientBucket", "the gradients' dtype", is_bucket_dtype);
  wire_ = {known_dtype(wire_dtype, "GradientBucket", "wire_dtype", is_wire_dtype), block_scaling};
  if (block_scaling && !has_block_scaling(wire_.dtype)) {
    refuse_bucket(join("block_scaling with wire_dtype ", name(wire_.dtype),
                       ", which has float32's range; use it with float16 or float8"));
  }
  std::vector<cuda::Tile> tiles;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    const at::Tensor& gradient = gradients_[i];
    check_gradient(gradient, first, i);
    auto* data = static_cast<std::byte*>(gradient.data_ptr());
    const auto num_elems = static_cast<uint64_t>(gradient.numel());
    for (uint64_t elem = 0; elem < num_elems; elem += kTileElems) {
      tiles.push_back(
          {data + elem * gradient.element_size(), schedule::min_of(kTileElems, num_elems - elem)});
    }
    num_bytes_ += num_elems * gradient.element_size();
  }
  num_tiles_ = tiles.size();
  const c10::DeviceGuard on_device(first.device());
  const auto num_list_bytes = static_cast<int64_t>(tiles.size() * sizeof(cuda::Tile));
  at::Tensor list = at::empty({num_list_bytes}, at::kByte);
  if (!tiles.empty()) std::memcpy(list.data_ptr(), tiles.data(), tiles.size() * sizeof(cuda::Tile));
  tiles_ = list.to(first.device());
  memory_.emplace(first.device(), num_tiles_, wire_);
  memory_->whole.zero_();  // words at rest, for an unpack without a pack before it
  stats_ = at::empty({2}, at::TensorOptions(at::kDouble).device(first.device()));
  cuda::check_bucket(args(1, 1), dtype_, wire_);
}

cuda::BucketArgs GradientBucket::args(float contribution_factor, float result_factor) const {
  return {.tiles = static_cast<const cuda::Tile*>(tiles_.data_ptr()),
          .contiguous = {},
          .num_tiles = num_tiles_,
          .wire = memory_->wire,
          .contribution_factor = contribution_factor,
          .result_factor = result_factor};
}

void GradientBucket::pack(float contribution_factor, const std::optional<at::Tensor>& residual,
                          std::optional<uint64_t> stochastic_seed) {
  if (residual && (residual->scalar_type() != at::kFloat || !residual->is_contiguous() ||
                   static_cast<uint64_t>(residual->numel()) != num_elems() ||
                   residual->device() != stats_.device())) {
    refuse_bucket(join("residual is not ", num_elems(), " contiguous elements of Float on ",
                       stats_.device().str()));
  }
  const c10::DeviceGuard on_device(stats_.device());
  cuda::launch_pack({.bucket = args(contribution_factor, 1),
                     .residual = residual ? residual->data_ptr<float>() : nullptr,
                     .rounding = {.is_stochastic = stochastic_seed.has_value(),
                                  .seed = stochastic_seed.value_or(0),
                                  .stream = 0},
                     .words = memory_->words},
                    dtype_, wire_, current_stream(stats_.device()));
}

void GradientBucket::unpack(float result_factor) {
  const c10::DeviceGuard on_device(stats_.device());
  cuda::launch_unpack({.bucket = args(1, result_factor),
                       .squares = memory_->squares,
                       .stats = stats_.data_ptr<double>(),
                       .words = memory_->words},
                      dtype_, wire_, current_stream(stats_.device()));
}

at::Tensor GradientBucket::wire() const {
  return memory_->whole.narrow(0, 0, static_cast<int64_t>(memory_->num_wire_bytes));
}

}  // namespace

void add_gradient_bucket(py::module_& module) {
  py::class_<GradientBucket>(module, "GradientBucket")
      .def(py::init<Tensors, at::ScalarType, bool>(), py::arg("gradients"), py::arg("wire_dtype"),
           py::arg("block_scaling"), ReleaseGil())
      .def("pack", &GradientBucket::pack, py::kw_only(), py::arg("contribution_factor") = 1.0f,
           py::arg("residual") = py::none(), py::arg("stochastic_seed") = py::none(), ReleaseGil())
      .def("unpack", &GradientBucket::unpack, py::kw_only(), py::arg("result_factor") = 1.0f,
           ReleaseGil())
      .def_property_readonly("wire", &GradientBucket::wire)
      .def_property_readonly("stats", &GradientBucket::stats)
      .def_property_readonly("num_elems", &GradientBucket::num_elems)
      .def_property_readonly("num_bytes", &GradientBucket::num_bytes)
      .def_property_readonly("num_wire_bytes",
                             [](const GradientBucket& self) { return self.wire().numel(); });
}

}  // namespace rota::tensors
