// Packs gradients into a wire buffer in one launch, and unpacks them in another: what the fused
// hook does around its all-reduce, for use with another all-reduce.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "cuda/launch.h"
#include "tensor/cuda/bucket_memory.h"

namespace rota::tensors {

class GradientBucket {
 public:
  // gradients: contiguous, of one float dtype, on one GPU; their memory must stay where it is.
  // Copies the list of their addresses to the GPU, and waits for that.
  GradientBucket(std::vector<at::Tensor> gradients, at::ScalarType wire_dtype, bool block_scaling);

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

  std::vector<at::Tensor> gradients_;
  DType dtype_;
  WireFormat wire_;
  uint64_t num_bytes_ = 0;
  uint64_t num_tiles_ = 0;
  at::Tensor tiles_;  // cuda::Tile[num_tiles_], as uint8
  std::optional<BucketMemory> memory_;
  at::Tensor stats_;
};

}  // namespace rota::tensors
