// A collective of one rank's tensors, as its caller asks for it, its checks and its plan.
// Everything here follows from the row of schedule/collective.h; packed_operation.h runs it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <optional>
#include <vector>

#include "core/message_queues.h"
#include "core/plan.h"
#include "tensor/tensor_checks.h"

namespace rota::tensors {

// How long each wait of one call for another rank may take; none: the group's timeout. Kernels
// always apply the group's.
using OwnTimeout = std::optional<std::chrono::milliseconds>;

// Refers to the tensors, and owns nothing.
struct Operation {
  CollectiveKind kind;
  // Either one tensor, or one for each rank; where the row says that a side has a part for each
  // rank, one tensor holds all parts, by rank. A collective in place has its tensor in `outputs`.
  // A side is empty on a rank that has no part in it.
  at::TensorList inputs;
  at::TensorList outputs;
  int root = 0;
  AllReduceOptions reduction;  // op and order: of those that reduce; the rest only of all_reduce
  std::optional<double> premul_factor;  // multiplies this rank's contribution
  std::optional<WireFormat> wire;  // of reduce_scatter and all_gather; none: the tensor's dtype
  // The elements of each rank's part of a side with one tensor; empty: all parts are equal.
  at::IntArrayRef input_splits;
  at::IntArrayRef output_splits;
  OwnTimeout timeout;

  const at::Tensor& any_tensor() const;  // undefined if there is none
};

// One rank's tensors of one gradient bucket.
struct BucketTensors {
  at::Tensor bucket;
  at::Tensor stats;  // float64[2], output: number of non-finite elements, sum of squares
  std::optional<at::Tensor> residual;  // float32, as many elements as the bucket
};

// A copy that another thread can use.
class OwnedOperation {
 public:
  explicit OwnedOperation(const Operation& operation);
  Operation view() const;

 private:
  Operation operation_;  // its references are stale
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Storage> memory_;  // so that it counts as held (heap_tensor.h)
  std::vector<int64_t> input_splits_;
  std::vector<int64_t> output_splits_;
};

// Checks the tensors, which must be on `device`, and plans the call. Throws Error(kType) or
// Error(kValue).
Call plan(const Operation& operation, const Planner& planner, int rank, at::Device device);
// Likewise a gradient bucket, which may be on any device.
Call plan(const BucketTensors& tensors, const Planner& planner, const BucketOptions& options);

// Throws Error(kValue) if an output of planned operations shares bytes with another one, or with a
// tensor of another operation. Inputs and outputs of one operation may: see PackedOperation.
void check_all_apart(at::ArrayRef<Operation> operations);
inline void check_apart(at::ArrayRef<Operation> operations) {
  if (operations.size() != 1 || operations[0].outputs.size() > 1) check_all_apart(operations);
}

// The same of messages that are made as one.
void check_messages_apart(at::TensorList sent, at::TensorList received);

// Checks a queued call when it begins: replan() plans it anew, because a tensor may have been
// resized, replaced or freed since. If so, agree() makes the call, marked as withdrawn, which is a
// mismatch on every other rank: they would wait for it otherwise, or take the next one for it.
// Throws Error.
void check_unchanged(const Call& planned, c10::function_ref<Call()> replan,
                     c10::function_ref<void(const Call&)> agree);

// By rank, or one.
using Lengths = c10::SmallVector<uint64_t, 8>;
// The elements of each part of a planned operation's inputs and outputs, not in place; empty on a
// rank that has no part in that side.
Lengths input_lengths(const Operation& operation, int rank, int world_size);
Lengths output_lengths(const Operation& operation, int rank, int world_size);

::c10d::OpType op_type_of(CollectiveKind kind);
constexpr ::c10d::OpType op_type_of(Direction direction) {
  return direction == Direction::kSend ? ::c10d::OpType::SEND : ::c10d::OpType::RECV;
}
// As profilers show it.
constexpr const char* title_of(Direction direction) {
  return direction == Direction::kSend ? "rota:send" : "rota:recv";
}

}  // namespace rota::tensors
