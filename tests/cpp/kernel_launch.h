// One launch of a kernel body on threads of the host, picked by what is known at run time only. As
// the launches on a GPU, but for what host_block.h stands for.
#pragma once

#include "cuda/launch_plan.h"
#include "host_block.h"

namespace rota::test {

using cuda::Kernel;

struct KernelLaunch {
  Kernel kernel;
  WireFormat format;
  cuda::CollectiveArgs args;
  cuda::MappedTensors tensors;  // of two_shot_in_place
  bool has_part = true;         // this rank, in what two ranks do
};

// On one thread of one rank.
void launch(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);

// The same in parts, which take the compiler a while each.
void launch_direct(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);
void launch_ring(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);
void launch_groups(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);
void launch_other(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);

}  // namespace rota::test
