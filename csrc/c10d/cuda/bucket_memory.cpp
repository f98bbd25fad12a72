#include "c10d/cuda/bucket_memory.h"

#include <ATen/ops/empty.h>

#include "base/fixed_tree.h"
#include "base/tile.h"
#include "schedule/chunk.h"

namespace rota::c10d_glue {
namespace {

constexpr size_t kGranuleBytes = 256;  // what parts of the memory start at

size_t rounded_up(size_t num_bytes) {
  return schedule::ceil_div(num_bytes, kGranuleBytes) * kGranuleBytes;
}

}  // namespace

BucketMemory::BucketMemory(at::Device device, uint64_t num_tiles, const WireFormat& wire_format)
    : num_wire_bytes(wire_format.num_bytes(num_tiles * kTileElems)) {
  const size_t wire_end = rounded_up(num_wire_bytes);
  const uint64_t num_groups = schedule::ceil_div(num_tiles, kTreeGroup);
  const size_t squares_end = rounded_up(wire_end + (num_groups + 2) * sizeof(double));
  const size_t end = squares_end + 2 * sizeof(uint64_t) + sizeof(uint32_t);
  whole = at::empty({static_cast<int64_t>(end)}, at::TensorOptions(at::kByte).device(device));
  whole.narrow(0, static_cast<int64_t>(squares_end), static_cast<int64_t>(end - squares_end))
      .zero_();
  auto* base = static_cast<std::byte*>(whole.data_ptr());
  wire = base;
  stats = reinterpret_cast<double*>(base + wire_end);
  squares = stats + 2;
  num_packed_non_finite = reinterpret_cast<uint64_t*>(base + squares_end);
  num_non_finite = num_packed_non_finite + 1;
  num_blocks_done = reinterpret_cast<uint32_t*>(num_non_finite + 1);
}

}  // namespace rota::c10d_glue
