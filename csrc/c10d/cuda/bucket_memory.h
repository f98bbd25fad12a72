// The memory that pack and unpack need beside the gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include "base/wire_format.h"

namespace rota::c10d_glue {

// One allocation, on the stream that is current; words are at rest.
struct BucketMemory {
  BucketMemory(at::Device device, uint64_t num_tiles, const WireFormat& wire);

  at::Tensor whole;  // uint8
  std::byte* wire;
  size_t num_wire_bytes;
  double* squares;
  double* stats;
  uint64_t* num_packed_non_finite;
  uint64_t* num_non_finite;  // of unpack, as is the next
  uint32_t* num_blocks_done;
};

}  // namespace rota::c10d_glue
