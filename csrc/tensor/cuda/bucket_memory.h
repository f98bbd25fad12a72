// The memory that pack and unpack need besides the gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/wire_format.h"
#include "cuda/bucket_args.h"

namespace rota::tensors {

// One uninitialised allocation, on the current stream.
struct BucketMemory {
  BucketMemory(at::Device device, uint64_t num_tiles, const WireFormat& wire);

  at::Tensor whole;  // uint8
  std::byte* wire;
  size_t num_wire_bytes;
  double* squares;
  double* stats;
  cuda::UnpackWords* words;
};

}  // namespace rota::tensors
