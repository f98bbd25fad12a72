#include "tensor/cuda/device_windows.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include "tensor/cuda/join_gpus.h"

namespace rota::tensors {
namespace {

// Destroyed from the end: the owners hear that their memory is not mapped any more after it was
// unmapped.
struct MappedWindows {
  std::vector<std::shared_ptr<OpenedTensor>> opened;
  std::shared_ptr<void> mapped;
};

}  // namespace

std::vector<at::Tensor> map_device_windows(const std::shared_ptr<ExposedTensor>& own,
                                           const std::vector<std::shared_ptr<OpenedTensor>>& others,
                                           int rank, const c10::intrusive_ptr<::c10d::Store>& store,
                                           at::Device device, size_t num_bytes,
                                           const transport::AllGatherText& all_gather) {
  const c10::DeviceGuard on_device(device);
  transport::DeviceRegions regions =
      connect_regions(store, rank, static_cast<int>(others.size()), device, num_bytes, all_gather);
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

}  // namespace rota::tensors
