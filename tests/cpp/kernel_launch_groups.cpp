#include "cuda/hierarchical.h"
#include "kernel_launch.h"

namespace rota::test {

void launch_groups(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch) {
  with_codec(launch.format,
             [&]<typename Codec>() { cuda::hierarchical<Codec>(block, peers, launch.args); });
}

}  // namespace rota::test
