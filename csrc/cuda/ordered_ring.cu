#include "cuda/ordered_ring.h"

#include "cuda/device_block.h"
#include "cuda/formats.h"
#include "cuda/kernels.h"
#include "cuda/launch_plan.h"

namespace rota::cuda {

template <typename Codec>
__global__ __launch_bounds__(kThreadsPerBlock, 1) void ordered_ring_kernel(
    const __grid_constant__ Peers peers, const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  ordered_ring<Codec>(block, peers, args);
}

const void* ordered_ring_kernel_of(const WireFormat& format) {
  return with_codec(format, [](auto codec) {
    return reinterpret_cast<const void*>(&ordered_ring_kernel<decltype(codec)>);
  });
}

}  // namespace rota::cuda
