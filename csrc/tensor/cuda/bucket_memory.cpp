#include "tensor/cuda/bucket_memory.h"

#include <ATen/ops/empty.h>

#include "base/fixed_tree.h"

namespace rota::tensors {
namespace {

constexpr size_t kPartAlignment = 256;

size_t rounded_up(size_t num_bytes) {
  return schedule::ceil_div(num_bytes, kPartAlignment) * kPartAlignment;
}

}  // namespace

BucketMemory::BucketMemory(at::Device device, uint64_t num_tiles, const WireFormat& wire_format)
    : num_wire_bytes(wire_format.num_bytes(num_tiles * kTileElems)) {
  const size_t wire_end = rounded_up(num_wire_bytes);
  const uint64_t num_groups = schedule::ceil_div(num_tiles, kTreeGroup);
  const size_t squares_end = rounded_up(wire_end + (num_groups + 2) * sizeof(double));
  const size_t end = squares_end + sizeof(cuda::UnpackWords);
  whole = at::empty({static_cast<int64_t>(end)}, at::TensorOptions(at::kByte).device(device));
  auto* base = static_cast<std::byte*>(whole.data_ptr());
  wire = base;
  stats = reinterpret_cast<double*>(base + wire_end);
  squares = stats + 2;
  words = reinterpret_cast<cuda::UnpackWords*>(base + squares_end);
}

}  // namespace rota::tensors
