#include "cuda/one_shot.h"
#include "cuda/two_shot.h"
#include "cuda/two_shot_in_place.h"
#include "kernel_launch.h"

namespace rota::test {

void launch_direct(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch) {
  with_codec(launch.format, [&]<typename Codec>() {
    if (launch.kernel == Kernel::kOneShot) {
      cuda::one_shot<Codec>(block, peers, launch.args);
    } else if (launch.kernel == Kernel::kTwoShot) {
      cuda::two_shot<Codec>(block, peers, launch.args);
    } else {
      cuda::two_shot_in_place<Codec>(block, peers, launch.args, launch.tensors);
    }
  });
}

}  // namespace rota::test
