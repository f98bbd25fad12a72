// What tensor/cuda/ does for other folders; CPU builds use without_cuda.cpp instead.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "tensor/hosts/bridged_collectives.h"
#include "tensor/hosts/torch_connections.h"

namespace rota::tensors {

// Whether this thread's current stream on `device` is being captured into a CUDA graph.
bool is_capturing(at::Device device);

// Collective, also over `store`; blocks. Each rank's tensors must be on the device it passes.
// Throws Error(kTransport) if this build or machine does not support it, or a GPU fails the
// self-test.
std::unique_ptr<Collectives> connect_gpus(std::shared_ptr<Communicator> communicator,
                                          const c10::intrusive_ptr<::c10d::Store>& store,
                                          at::Device device, CallerThread thread);

// The same for ranks on several hosts, over `store` of them all. engine: carries CUDA tensors
// between hosts. Where a host's GPUs cannot be joined, what it returns stages, on all ranks. Throws
// Error(kTransport) on every rank if the engine does not work.
std::unique_ptr<Collectives> connect_gpus_of_hosts(BridgedCollectives& bridged, CpuCollectives& cpu,
                                                   const c10::intrusive_ptr<::c10d::Store>& store,
                                                   at::Device device, const BackendPtr& engine);

// LocalGroup, GradientBucket and the memory of windows; python/rota/_C/__init__.pyi documents them.
void add_gpu_classes(pybind11::module_& module);

// ---- the self-test, for `python -m rota doctor`

struct KernelReport {
  std::string kernel;  // "two_shot", "pack"
  size_t num_formats;  // tested; for pack and unpack, pairs of gradient dtype and wire format
  std::vector<std::string> findings;
  double milliseconds;  // launches, copies and comparisons, all formats together
};

// Tests the GPU with this index even if there is a record, and replaces the record. Blocks. Throws
// Error(kTransport) with the CUDA runtime's error, or naming a kernel that did not finish.
std::vector<KernelReport> run_gpu_self_test(int device);

// The failures recorded for this GPU, driver and build; nullopt without a record. Throws
// Error(kTransport). Creates no CUDA context.
std::optional<std::vector<std::string>> recorded_gpu_self_test(int device);

}  // namespace rota::tensors
