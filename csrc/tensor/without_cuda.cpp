// Replaces tensor/cuda/ in CPU builds.
#if !defined(ROTA_WITH_CUDA)

#include "tensor/gpus.h"

namespace rota::tensors {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorKind::kTransport, "this build of rota is for the CPU");
}

}  // namespace

bool is_capturing(at::Device) { return false; }

std::unique_ptr<Collectives> connect_gpus(std::shared_ptr<Communicator>,
                                          const c10::intrusive_ptr<::c10d::Store>&,
                                          at::Device device, CallerThread) {
  throw Error(ErrorKind::kTransport,
              join("rota: a tensor is on ", device.str(),
                   ", but this build of rota is for the CPU; build it anew where nvcc and a CUDA "
                   "build of torch are (ROTA_CUDA=1 pip install --no-build-isolation .)"));
}

// No rank of this build has CUDA tensors.
std::unique_ptr<Collectives> connect_gpus_of_hosts(BridgedCollectives&, CpuCollectives&,
                                                   const c10::intrusive_ptr<::c10d::Store>&,
                                                   at::Device, const BackendPtr&) {
  refuse();
}

std::vector<KernelReport> run_gpu_self_test(int) { refuse(); }

std::optional<std::vector<std::string>> recorded_gpu_self_test(int) { refuse(); }

void add_gpu_classes(pybind11::module_&) {}

}  // namespace rota::tensors

#endif
