// The collectives that only move data: bytes, whatever the dtype.
#include "cuda/device_block.h"
#include "cuda/kernels.h"
#include "cuda/launch_plan.h"
#include "cuda/point_to_point.h"
#include "cuda/shards.h"

namespace rota::cuda {

__global__ __launch_bounds__(kThreadsPerBlock, 1) void all_gather_kernel(
    const __grid_constant__ Peers peers, const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  all_gather<Bytes>(block, peers, args);
}

__global__ __launch_bounds__(kThreadsPerBlock,
                             1) void broadcast_kernel(const __grid_constant__ Peers peers,
                                                      const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  broadcast(block, peers, args);
}

__global__ __launch_bounds__(kThreadsPerBlock,
                             1) void send_kernel(const __grid_constant__ Peers peers,
                                                 const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  send(block, peers, args);
}

__global__ __launch_bounds__(kThreadsPerBlock,
                             1) void receive_kernel(const __grid_constant__ Peers peers,
                                                    const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  receive(block, peers, args);
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
const void* send_kernel_of(const WireFormat& format) { return of_bytes(format, &send_kernel); }
const void* receive_kernel_of(const WireFormat& format) {
  return of_bytes(format, &receive_kernel);
}

}  // namespace rota::cuda
