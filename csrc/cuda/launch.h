// Queues kernels on a stream, after checking everything. Throws Error: kValue for a bad request,
// kTransport for errors of the CUDA runtime. Nothing here waits for the GPU.
#pragma once

#include "cuda/launch_plan.h"

struct CUstream_st;

namespace rota::cuda {

using Stream = CUstream_st*;  // cudaStream_t, for headers that do not include CUDA's

// Has the driver load every kernel for the current GPU. A kernel loaded only at its first launch
// might wait for running kernels, which may wait for this process.
void load_kernels();

// Whether a collective is compiled for a format, and whether pack and unpack are.
bool is_compiled(Kernel kernel, const WireFormat& format, Sums sums);
bool is_bucket_compiled(DType gradients, const WireFormat& wire);

// Multiprocessors of the current GPU. That many blocks of any collective that waits can be resident
// together.
int num_multiprocessors();
// Whether the current GPU has cooperative launches, which local ranks need.
bool starts_grids_as_a_whole();

// A collective's kernel for the current GPU, with all its arguments except Peers.
struct ResidentPlan {
  Kernel kernel;
  const void* function;  // null: there is nothing to do
  LaunchPlan launch;
  MappedTensors tensors;
};

// Blocks that wait must all be resident together, or they would wait for a block that never starts.
// Refuses more blocks than that.
ResidentPlan plan_resident(const LaunchRequest& request, const Peers& peers,
                           const schedule::Tuning& tuning);
// The plan must have something to do.
void launch_collective(const ResidentPlan& plan, const Peers& peers, Stream stream);

// Queues a copy between buffers of the current GPU.
void launch_copy(void* dst, const void* src, size_t num_bytes, Stream stream);

// dtype: of the gradients.
void launch_pack(const PackArgs& args, DType dtype, const WireFormat& wire, Stream stream);
void launch_unpack(const UnpackArgs& args, DType dtype, const WireFormat& wire, Stream stream);

}  // namespace rota::cuda
