#include "cuda/formats.h"
#include "cuda/hierarchical.h"
#include "kernel_launch.h"

namespace rota::test {

void launch_groups(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch) {
  cuda::with_codec(launch.format, [&](auto codec) {
    using Codec = decltype(codec);
    cuda::hierarchical<Codec>(block, peers, launch.args);
    return true;
  });
}

}  // namespace rota::test
