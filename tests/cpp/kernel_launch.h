// Launches a kernel body on host threads, selected by run-time values as on a GPU; host_block.h
// replaces the GPU's block.
#pragma once

#include "cuda/launch_plan.h"
#include "host_block.h"

namespace rota::test {

using cuda::Kernel;

struct KernelLaunch {
  Kernel kernel;
  WireFormat format;
  cuda::Sums sums = cuda::Sums::kInGroups;
  cuda::CollectiveArgs args;
  cuda::MappedTensors tensors;  // two_shot_in_place only
  bool has_part = true;         // whether this rank takes part in a transfer
};

// Runs on one thread of one rank.
void launch(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);

// launch() in parts, because each takes the compiler a while.
void launch_direct(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);
void launch_partials(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);
void launch_other(const HostBlock& block, const cuda::Peers& peers, const KernelLaunch& launch);

}  // namespace rota::test
