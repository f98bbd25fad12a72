#include "kernel_launch.h"

#include "cuda/formats.h"
#include "cuda/low_latency.h"
#include "cuda/point_to_point.h"
#include "cuda/shards.h"

namespace rota::test {

void launch_other(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch) {
  cuda::with_codec(launch.format, [&](auto codec) {
    using Codec = decltype(codec);
    if (launch.kernel == Kernel::kAllGather) {
      cuda::all_gather<Codec>(block, peers, launch.args);
      return true;
    }
    return cuda::with_sums<Codec>(launch.sums, [&](auto sums) {
      if (launch.kernel == Kernel::kReduceScatter) {
        cuda::reduce_scatter<Codec, sums()>(block, peers, launch.args);
      } else if constexpr (!Codec::format().is_block_scaled) {
        cuda::low_latency<Codec, sums()>(block, peers, launch.args);
      }
      return true;
    });
  });
}

void launch(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch) {
  if (!launch.has_part) return;
  switch (launch.kernel) {
    case Kernel::kOneShot:
    case Kernel::kTwoShot:
    case Kernel::kTwoShotInPlace:
      return launch_direct(block, peers, launch);
    case Kernel::kRing:
    case Kernel::kOrderedRing:
    case Kernel::kHierarchical:
      return launch_partials(block, peers, launch);
    case Kernel::kLowLatency:
    case Kernel::kReduceScatter:
    case Kernel::kAllGather:
      return launch_other(block, peers, launch);
    case Kernel::kBroadcast:
      return cuda::broadcast(block, peers, launch.args);
    case Kernel::kTransfer:
      return cuda::transfer(block, peers, launch.args);
  }
}

}  // namespace rota::test
