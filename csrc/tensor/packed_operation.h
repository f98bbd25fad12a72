// The memory of a planned operation: contiguous, where its parts lie, and back to the tensors. Runs
// operations on the CPU.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "cpu/buffers.h"
#include "tensor/operation.h"
#include "tensor/tensor_memory.h"

namespace rota::tensors {

// One side's tensors as contiguous memory on their device, and where each part lies there.
class PackedSide {
 public:
  // tensors: one for each part, or one for all.
  PackedSide(at::TensorList tensors, c10::ArrayRef<uint64_t> lengths, Packed::Content content,
             std::optional<double> factor = std::nullopt);

  const cpu::Part* parts() const { return parts_.empty() ? nullptr : parts_.data(); }
  size_t num_parts() const { return parts_.size(); }
  ByteRange range_of(size_t part) const;
  // As Packed::set_aside(), of all tensors.
  void set_aside();
  void unpack() const;

 private:
  void place_parts();

  std::vector<Packed> packed_;
  c10::SmallVector<cpu::Part, 8> parts_;
};

// Both sides of a planned operation that is not in place; refers to its tensors. Sides that this
// rank has no part in are null. This rank's own part may be the same memory in both. Where they
// share other bytes, the shorter side is a copy, so nothing is read after it has been overwritten.
class PackedOperation {
 public:
  PackedOperation(const Operation& operation, int rank, int world_size);

  cpu::Buffers buffers() const { return {.inputs = inputs_.parts(), .outputs = outputs_.parts()}; }
  // Call it once the outputs are there.
  void unpack() const { outputs_.unpack(); }

 private:
  PackedSide inputs_;
  PackedSide outputs_;
};

// Runs a planned operation on CPU tensors by run(buffers). Strided ones are packed and unpacked.
void run_on_cpu(const Operation& operation, const Call& call, int rank, int world_size,
                c10::function_ref<void(const cpu::Buffers&)> run);

// Reduces a bucket of CPU tensors by run(buffers), and writes its stats.
void run_bucket(const BucketTensors& tensors, const std::function<void(const cpu::Buffers&)>& run);

}  // namespace rota::tensors
