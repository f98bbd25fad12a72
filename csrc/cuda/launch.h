// Queues kernels on a stream. Everything is checked first; what comes back throws Error: kValue for
// what was asked for, kTransport for what the CUDA runtime says. Nothing here waits for the GPU.
#pragma once

#include "cuda/launch_plan.h"

struct CUstream_st;

namespace rota::cuda {

using Stream = CUstream_st*;  // cudaStream_t, for headers that know no CUDA

// Has the driver load every kernel for the current GPU. It would load each at its first launch, and
// might then wait for kernels that run, which may wait for this process.
void load_kernels();

// Whether a collective is compiled for a format, and whether pack and unpack are.
bool is_compiled(Kernel kernel, const WireFormat& format);
bool is_bucket_compiled(DType gradients, const WireFormat& wire);

// Of the current GPU: as many blocks of any collective that waits are resident together.
int num_multiprocessors();
// Of the current GPU: what launches of local ranks need.
bool starts_grids_as_a_whole();

// A collective's kernel for the current GPU, and all that it is told but of its peers.
struct ResidentPlan {
  Kernel kernel;
  const void* function;  // null: there is nothing to do
  LaunchPlan launch;
  MappedTensors tensors;
};

// Blocks that wait must all be resident together, or they would wait for one that never starts:
// more are refused.
ResidentPlan plan_resident(const LaunchRequest& request, const Peers& peers,
                           const schedule::Tuning& tuning);
// Of a plan that has something to do.
void launch_collective(const ResidentPlan& plan, const Peers& peers, Stream stream);

// dtype: of the gradients.
void launch_pack(const PackArgs& args, DType dtype, const WireFormat& wire, Stream stream);
void launch_unpack(const UnpackArgs& args, DType dtype, const WireFormat& wire, Stream stream);

}  // namespace rota::cuda
