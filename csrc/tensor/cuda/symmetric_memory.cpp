#include "tensor/cuda/symmetric_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "base/error.h"

namespace rota::tensors {
namespace {

namespace symmetric = ::c10d::symmetric_memory;

// How long ranks wait for each other's handles: see check_same_number().
constexpr auto kRendezvousTimeout = std::chrono::seconds(10);

// How many groups this process has made memory with.
std::atomic<int> num_groups{0};

// A process group for torch's symmetric memory, which looks groups up by name within a process. It
// has a store and moves no data. c10d's registry refers to it weakly, so it exists as long as this
// object.
class NamedGroup {
 public:
  NamedGroup(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int world_size) {
    name_ = join("rota/", num_groups++);
    const auto own_store = store->clone();
    own_store->setTimeout(kRendezvousTimeout);
    group_ = c10::make_intrusive<::c10d::ProcessGroup>(own_store, rank, world_size);
    ::c10d::register_process_group(name_, group_);
  }
  ~NamedGroup() { ::c10d::unregister_process_group(name_); }
  NamedGroup(const NamedGroup&) = delete;
  NamedGroup& operator=(const NamedGroup&) = delete;
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  c10::intrusive_ptr<::c10d::ProcessGroup> group_;
};

// This rank's memory and the group that it was made for. torch looks the group up by name in
// rendezvous() and again when a mapping is used, so the group must outlive both memory and mapping.
struct NamedMemory {
  std::optional<NamedGroup> group;
  at::Tensor tensor;
};

using Mapping = c10::intrusive_ptr<symmetric::SymmetricMemory>;

// torch 2.11 to 2.15 ask NVML which GPUs are joined by a fabric, and crash if it is missing.
void check_nvml() {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
  if (library == nullptr) throw Error(ErrorKind::kTransport, "libnvidia-ml.so.1 is not found");
  dlclose(library);
}

// In torch 2.11 to 2.13, a rank that has made memory with more groups than its peers looks under
// other keys of the store than they do, and all wait in vain. rota's groups are counted here, as
// where a process joins others that have trained before; the user's own are not known.
void check_same_number(const transport::AllGatherText& all_gather) {
  const std::vector<std::string> numbers = all_gather(std::to_string(num_groups.load()));
  for (const std::string& number : numbers) {
    if (number == numbers[0]) continue;
    throw Error(ErrorKind::kTransport,
                join("a rank has made memory with ", number, " groups, rank 0 with ", numbers[0]));
  }
}

}  // namespace

transport::DeviceRegions connect_by_symmetric_memory(const c10::intrusive_ptr<::c10d::Store>& store,
                                                     int rank, int world_size, at::Device device,
                                                     size_t num_bytes,
                                                     const transport::AllGatherText& all_gather) {
  const auto own = std::make_shared<NamedMemory>();
  const auto mapped = std::make_shared<Mapping>();
  check_same_number(all_gather);
  transport::agree(all_gather, rank, [&] {
    check_nvml();
    own->group.emplace(store, rank, world_size);
    own->tensor = symmetric::empty_strided_p2p({static_cast<int64_t>(num_bytes)}, {1}, at::kByte,
                                               device, own->group->name(), std::nullopt);
    own->tensor.zero_();
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  });
  // torch's memory also refers to its mapping and counts who maps it: it is freed with the last
  // one.
  transport::DeviceRegions regions{
      .means = "torch's symmetric memory", .own = own, .mapped = mapped};
  transport::agree(all_gather, rank, [&] {
    *mapped = symmetric::rendezvous(own->tensor, own->group->name());
    for (void* buffer : (*mapped)->get_buffer_ptrs()) {
      regions.by_rank.push_back(static_cast<std::byte*>(buffer));
    }
  });
  return regions;
}

}  // namespace rota::tensors
