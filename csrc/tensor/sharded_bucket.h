// A bucket of parameters whose elements the ranks own in pieces (schedule/pieces.h): this rank's
// sums and states of its own pieces, and where all of them lie in its parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/plan.h"
#include "cpu/buffers.h"
#include "tensor/operation.h"

namespace rota::tensors {

class ShardedBucket {
 public:
  // float32, of as many elements as the piece; none: not needed.
  struct State {
    std::optional<at::Tensor> parameters, momentum, squares, largest;
  };

  // parameters: dense CPU tensors of one dtype, which lie in the bucket one behind the other.
  // pieces: int64, rows of (begin, number of elements, owner, number of the first tile). Throws
  // Error(kType) or Error(kValue).
  ShardedBucket(std::vector<at::Tensor> parameters, const at::Tensor& pieces, int rank,
                int world_size);

  const schedule::Pieces& pieces() const { return pieces_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // Float32, of the own pieces, each padded to whole tiles.
  const at::Tensor& sums() const { return sums_; }
  // Of an own piece. Throws Error(kValue) for another, or if a tensor does not fit it.
  void set_state(size_t piece, const State& state);

  // Each checks the tensors and returns what runs the call; throws Error.
  // tensors.stats: int64[1 + ExactSum::kNumWords], output: number of non-finite elements and the
  // sum of the squares of the finite leaves, both of this rank's pieces.
  Call plan_reduction(const BucketTensors& tensors, const Planner& planner,
                      const BucketOptions& options) const;
  Call plan_update(const cpu::UpdateSteps& steps) const;

  void run_reduction(const BucketTensors& tensors,
                     const std::function<void(const cpu::Buffers&)>& run) const;
  // steps: by piece.
  void run_update(cpu::UpdateSteps steps,
                  const std::function<void(const cpu::Buffers&)>& run) const;

 private:
  // Where a piece begins in the memory of its parameter.
  std::byte* data_of(size_t piece) const;
  void check_parameters() const;

  std::vector<at::Tensor> parameters_;
  schedule::Pieces pieces_;
  int rank_;
  std::vector<size_t> parameter_of_;  // by piece
  std::vector<uint64_t> offset_;      // by piece, in its parameter
  std::vector<State> states_;         // by piece
  at::Tensor sums_;
};

using ShardedBucketRef = std::shared_ptr<const ShardedBucket>;

}  // namespace rota::tensors
