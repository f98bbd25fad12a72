#include "tensor/cuda/gpu_classes.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include "tensor/cuda/join_gpus.h"
#include "tensor/window.h"

namespace rota::tensors {
namespace {

// Destroyed from the end: the owners hear that their memory is not mapped any more after it was
// unmapped.
struct MappedWindows {
  std::vector<std::shared_ptr<OpenedTensor>> opened;
  std::shared_ptr<void> mapped;
};

// Memory on each rank's GPU that the others of its host map. Its words, and the signals on it, are
// in a window on the CPU, which also tells who still maps the memory.
//
// All ranks' memory by rank, uint8 and zeroes, num_bytes (at least 1) each. own, others: the
// windows on the CPU, others null for this rank. Keeps `own`'s memory until no rank maps it, which
// a rank does as long as it has a tensor of another rank or a view of one.
//
// Collective, also over `store`. Throws Error(kTransport) on every rank if a rank fails.
std::vector<at::Tensor> map_device_windows(const std::shared_ptr<ExposedTensor>& own,
                                           const std::vector<std::shared_ptr<OpenedTensor>>& others,
                                           int rank, const c10::intrusive_ptr<::c10d::Store>& store,
                                           at::Device device, size_t num_bytes,
                                           const py::function& all_gather) {
  const c10::DeviceGuard on_device(device);
  transport::DeviceRegions regions =
      connect_regions(store, rank, static_cast<int>(others.size()), device, num_bytes,
                      [&](const std::string& text) {
                        const py::gil_scoped_acquire gil;
                        return all_gather(py::bytes(text)).cast<std::vector<std::string>>();
                      });
  own->keep(regions.own);
  const auto mapped = std::make_shared<MappedWindows>(others, std::move(regions.mapped));
  std::vector<at::Tensor> windows;
  for (int peer = 0; peer < static_cast<int>(others.size()); ++peer) {
    const std::shared_ptr<void> kept =
        peer == rank ? regions.own : std::static_pointer_cast<void>(mapped);
    windows.push_back(
        at::for_blob(regions.by_rank[static_cast<size_t>(peer)], {static_cast<int64_t>(num_bytes)})
            .deleter([kept](void*) {})
            .options(at::TensorOptions(at::kByte).device(device))
            .target_device(device)
            .make_tensor());
  }
  return windows;
}

}  // namespace

void add_gpu_classes(py::module_& module) {
  add_local_group(module);
  add_gradient_bucket(module);
  module.def("map_device_windows", &map_device_windows, py::arg("own"), py::arg("others"),
             py::arg("rank"), py::arg("store"), py::arg("device"), py::arg("num_bytes"),
             py::arg("all_gather"), ReleaseGil());
}

}  // namespace rota::tensors
