// The collectives that only move data: bytes, whatever the dtype.
#include "cuda/device_block.h"
#include "cuda/kernels.h"
#include "cuda/point_to_point.h"
#include "cuda/shards.h"

namespace rota::cuda {

ROTA_COLLECTIVE_KERNEL all_gather_kernel(const __grid_constant__ Peers peers,
                                         const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  all_gather<Bytes>(block, peers, args);
}

ROTA_COLLECTIVE_KERNEL broadcast_kernel(const __grid_constant__ Peers peers,
                                        const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  broadcast(block, peers, args);
}

ROTA_COLLECTIVE_KERNEL transfer_kernel(const __grid_constant__ Peers peers,
                                       const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  transfer(block, peers, args);
}

namespace {

template <typename Kernel>
const void* of_bytes(const WireFormat& format, Kernel* kernel) {
  return format == Bytes::format() ? reinterpret_cast<const void*>(kernel) : nullptr;
}

}  // namespace

const void* all_gather_kernel_of(const WireFormat& format) {
  return of_bytes(format, &all_gather_kernel);
}
const void* broadcast_kernel_of(const WireFormat& format) {
  return of_bytes(format, &broadcast_kernel);
}
const void* transfer_kernel_of(const WireFormat& format) {
  return of_bytes(format, &transfer_kernel);
}

}  // namespace rota::cuda
