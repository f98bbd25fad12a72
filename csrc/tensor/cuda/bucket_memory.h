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

// One tensor, and its elements in the wire format.
inline cuda::BucketArgs bucket_of(const void* data, uint64_t num_elems, void* wire,
                                  float contribution_factor, float result_factor) {
  return {.tiles = nullptr,
          .contiguous = {static_cast<std::byte*>(const_cast<void*>(data)), num_elems},
          .num_tiles = schedule::ceil_div(num_elems, kTileElems),
          .wire = static_cast<std::byte*>(wire),
          .contribution_factor = contribution_factor,
          .result_factor = result_factor};
}

}  // namespace rota::tensors
