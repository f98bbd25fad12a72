#include "tensor/cuda/gradient_bucket.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "base/error.h"
#include "schedule/chunk.h"
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

}  // namespace

GradientBucket::GradientBucket(std::vector<at::Tensor> gradients, at::ScalarType wire_dtype,
                               bool block_scaling)
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

}  // namespace rota::tensors
