#include "cuda/pack.h"

#include "cuda/device_block.h"
#include "cuda/formats.h"
#include "cuda/kernels.h"
#include "cuda/launch_plan.h"

namespace rota::cuda {

// Two blocks on a multiprocessor: the more is in flight, the less of memory's latency shows.
template <DType dtype, DType wire, bool is_scaled>
__global__ __launch_bounds__(kThreadsPerBlock,
                             2) void pack_kernel(const __grid_constant__ PackArgs args) {
  const DeviceBlock block;
  pack<dtype, wire, is_scaled>(block, args);
}

const void* pack_kernel_of(DType dtype, const WireFormat& wire) {
  return with_bucket_formats(dtype, wire, [](auto dtype_constant, auto codec) {
    constexpr WireFormat kWire = decltype(codec)::format();
    return reinterpret_cast<const void*>(
        &pack_kernel<dtype_constant(), kWire.dtype, kWire.is_block_scaled>);
  });
}

}  // namespace rota::cuda
