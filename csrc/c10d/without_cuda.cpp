// What stands in for c10d/cuda/ in a build for the CPU.
#if !defined(ROTA_WITH_CUDA)

#include "base/error.h"
#include "c10d/device_collectives.h"
#include "c10d/gpu_classes.h"

namespace rota::c10d_glue {

bool is_capturing(at::Device) { return false; }

std::unique_ptr<DeviceCollectives> connect_devices(std::shared_ptr<Communicator>,
                                                   const c10::intrusive_ptr<::c10d::Store>&,
                                                   at::Device device, CallerThread) {
  throw Error(ErrorKind::kTransport,
              join("rota: a tensor is on ", device.str(),
                   ", but this build of rota is for the CPU; build it anew where nvcc and a CUDA "
                   "build of torch are (ROTA_CUDA=1 pip install --no-build-isolation .)"));
}

void add_gpu_classes(pybind11::module_&) {}

}  // namespace rota::c10d_glue

#endif
