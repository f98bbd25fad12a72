#include "cuda/two_shot.h"

#include "cuda/device_block.h"
#include "cuda/formats.h"
#include "cuda/kernels.h"

namespace rota::cuda {

template <typename Codec, Sums kSums>
ROTA_SUM_KERNEL(kSums)
two_shot_kernel(const __grid_constant__ Peers peers, const __grid_constant__ CollectiveArgs args) {
  const DeviceBlock block;
  two_shot<Codec, kSums>(block, peers, args);
}

const void* two_shot_kernel_of(const WireFormat& format, Sums sums) {
  return with_codec(format, [sums](auto codec) {
    return with_sums<decltype(codec)>(sums, [](auto sums_constant) {
      return reinterpret_cast<const void*>(&two_shot_kernel<decltype(codec), sums_constant()>);
    });
  });
}

}  // namespace rota::cuda
