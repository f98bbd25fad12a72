#include "c10d/cuda/symmetric_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <atomic>

#include "base/error.h"

namespace rota::c10d_glue {
namespace {

namespace symmetric = ::c10d::symmetric_memory;

struct Owned {
  at::Tensor tensor;
  c10::intrusive_ptr<symmetric::SymmetricMemory> mapping;
};

// torch knows groups by name, within a process.
std::string make_group_name() {
  static std::atomic<int> num_groups{0};
  return join("rota/", num_groups++);
}

// torch 2.11 to 2.15 ask it which GPUs are joined by a fabric, and crash where it is missing.
void check_nvml() {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
  if (library == nullptr) throw Error(ErrorKind::kTransport, "libnvidia-ml.so.1 is not found");
  dlclose(library);
}

}  // namespace

transport::DeviceRegions connect_by_symmetric_memory(const c10::intrusive_ptr<::c10d::Store>& store,
                                                     int rank, int world_size, at::Device device,
                                                     size_t num_bytes,
                                                     const transport::AllGatherText& all_gather) {
  const auto owned = std::make_shared<Owned>();
  const std::string group_name = make_group_name();
  transport::agree(all_gather, rank, [&] {
    check_nvml();
    symmetric::set_group_info(group_name, rank, world_size, store);
    owned->tensor = symmetric::empty_strided_p2p({static_cast<int64_t>(num_bytes)}, {1}, at::kByte,
                                                 device, group_name, std::nullopt);
    owned->tensor.zero_();
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  });
  transport::DeviceRegions regions{.means = "torch's symmetric memory", .memory = owned};
  transport::agree(all_gather, rank, [&] {
    owned->mapping = symmetric::rendezvous(owned->tensor, group_name);
    for (void* buffer : owned->mapping->get_buffer_ptrs()) {
      regions.by_rank.push_back(static_cast<std::byte*>(buffer));
    }
  });
  return regions;
}

}  // namespace rota::c10d_glue
