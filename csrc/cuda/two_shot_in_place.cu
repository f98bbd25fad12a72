#include "cuda/two_shot_in_place.h"

#include "cuda/device_block.h"
#include "cuda/formats.h"
#include "cuda/kernels.h"
#include "cuda/launch_plan.h"

namespace rota::cuda {

template <typename Codec>
__global__ __launch_bounds__(kThreadsPerBlock, 1) void two_shot_in_place_kernel(
    const __grid_constant__ Peers peers, const __grid_constant__ CollectiveArgs args,
    const __grid_constant__ MappedTensors tensors) {
  const DeviceBlock block;
  two_shot_in_place<Codec>(block, peers, args, tensors);
}

const void* two_shot_in_place_kernel_of(const WireFormat& format) {
  return with_codec(format, [](auto codec) {
    return reinterpret_cast<const void*>(&two_shot_in_place_kernel<decltype(codec)>);
  });
}

}  // namespace rota::cuda
