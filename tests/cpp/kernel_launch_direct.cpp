#include "cuda/formats.h"
#include "cuda/one_shot.h"
#include "cuda/two_shot.h"
#include "cuda/two_shot_in_place.h"
#include "kernel_launch.h"

namespace rota::test {

void launch_direct(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch) {
  cuda::with_codec(launch.format, [&](auto codec) {
    using Codec = decltype(codec);
    return cuda::with_sums<Codec>(launch.sums, [&](auto sums) {
      if (launch.kernel == Kernel::kOneShot) {
        cuda::one_shot<Codec, sums()>(block, peers, launch.args);
      } else if (launch.kernel == Kernel::kTwoShot) {
        cuda::two_shot<Codec, sums()>(block, peers, launch.args);
      } else {
        cuda::two_shot_in_place<Codec, sums()>(block, peers, launch.args, launch.tensors);
      }
      return true;
    });
  });
}

}  // namespace rota::test
