#include "cuda/pack.h"

#include "cuda/device_block.h"
#include "cuda/formats.h"
#include "cuda/kernels.h"

namespace rota::cuda {

template <DType dtype, DType wire, bool is_scaled>
ROTA_BUCKET_KERNEL pack_kernel(const __grid_constant__ PackArgs args) {
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
