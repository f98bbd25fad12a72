#include "cuda/formats.h"
#include "cuda/hierarchical.h"
#include "cuda/ordered_ring.h"
#include "cuda/ring.h"
#include "kernel_launch.h"

namespace rota::test {

void launch_partials(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch) {
  cuda::with_codec(launch.format, [&](auto codec) {
    using Codec = decltype(codec);
    if (launch.kernel == Kernel::kRing) {
      cuda::ring<Codec>(block, peers, launch.args);
    } else if (launch.kernel == Kernel::kOrderedRing) {
      cuda::ordered_ring<Codec>(block, peers, launch.args);
    } else {
      cuda::hierarchical<Codec>(block, peers, launch.args);
    }
    return true;
  });
}

}  // namespace rota::test
