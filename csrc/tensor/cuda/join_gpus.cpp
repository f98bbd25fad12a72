#include "tensor/cuda/join_gpus.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cstdlib>

#include "cuda/executor.h"
#include "tensor/cuda/native_stream.h"
#include "tensor/cuda/self_test.h"
#include "tensor/tensor_checks.h"
#include "transport/gpu_identity.h"

namespace rota::tensors {
namespace {

// How long the first message between GPUs may take.
constexpr auto kVerifyTimeout = std::chrono::seconds(10);

// A text that one rank sends to the others.
struct Text {
  uint32_t length;
  char chars[2044];
};

// All-gathers texts of any length up to a bound, through the CPU's all-gather.
transport::AllGatherText all_gather_over(Communicator& communicator, CallerThread thread) {
  return [&communicator, thread](const std::string& own) {
    const auto num_ranks = static_cast<size_t>(communicator.world_size());
    Text text{.length = static_cast<uint32_t>(std::min(own.size(), sizeof(Text::chars)))};
    std::memcpy(text.chars, own.data(), text.length);
    std::vector<Text> texts(num_ranks);
    const cpu::Part input{&text, sizeof(Text)};
    std::vector<cpu::Part> outputs;
    for (Text& place : texts) outputs.push_back({&place, sizeof(Text)});
    communicator.run({.kind = CollectiveKind::kAllGather, .num_elems = sizeof(Text)},
                     {.inputs = &input, .outputs = outputs.data()}, thread);
    std::vector<std::string> all;
    for (const Text& each : texts) {
      all.emplace_back(each.chars, std::min(size_t{each.length}, sizeof(Text::chars)));
    }
    return all;
  };
}

// Checks every pair of GPUs, in every channel, with a kernel that collectives use. Each rank's
// shard is a different pattern.
void verify(const Communicator& communicator, at::Device device, const schedule::Tuning& tuning,
            const transport::DeviceGeometry& geometry, const JoinedRegions& regions,
            const transport::AllGatherText& all_gather) {
  const int rank = communicator.rank();
  const int world_size = communicator.world_size();
  const int64_t shard_bytes =
      int64_t{geometry.num_channels} * cuda::kThreadsPerBlock * cuda::kAccessBytes;
  const auto pattern_of = [&](int writer) {
    return at::arange(shard_bytes, at::kLong).add(writer * 37).remainder(251).to(at::kByte);
  };
  at::Tensor input, output;
  std::optional<cuda::Executor> executor;
  transport::agree(all_gather, rank, [&] {
    input = pattern_of(rank).to(device);
    output = at::empty({world_size * shard_bytes}, at::TensorOptions(at::kByte).device(device));
    executor.emplace(cuda::Executor::Options{
        .rank = rank,
        .tuning = tuning,
        .geometry = geometry,
        .regions = regions.by_rank(),
        .timeout = std::min<Nanoseconds>(kVerifyTimeout, communicator.timeout())});
  });
  transport::agree(all_gather, rank, [&] {
    executor->run(executor->plan({.kernel = cuda::Kernel::kAllGather,
                                  .input = {input.data_ptr()},
                                  .output = {output.data_ptr()},
                                  .num_elems = num_bytes(output),
                                  .format = cuda::kBytes}),
                  current_stream(device));
    const at::Tensor received = output.cpu();
    constexpr auto kCause = " wrote to its GPU; the machine's IOMMU or ACS may break peer access";
    if (const auto failure = executor->failure()) {
      throw Error(ErrorKind::kTransport, join("got nothing of what rank ", failure->peer, kCause));
    }
    for (int peer = 0; peer < world_size; ++peer) {
      if (received.narrow(0, peer * shard_bytes, shard_bytes).equal(pattern_of(peer))) continue;
      throw Error(ErrorKind::kTransport, join("read something else than rank ", peer, kCause));
    }
  });
}

namespace symmetric = ::c10d::symmetric_memory;

// How long ranks wait for each other's handles: see check_same_number().
constexpr auto kRendezvousTimeout = std::chrono::seconds(10);

// How many groups this process has made memory with.
std::atomic<int> num_groups{0};

// This rank's memory, and the process group that it was made for, which has a store and moves no
// data. torch looks the group up by name, within a process, in rendezvous() and again when a
// mapping is used, so the group must outlive both memory and mapping. c10d's registry refers to it
// weakly.
struct NamedMemory {
  std::string name;
  c10::intrusive_ptr<::c10d::ProcessGroup> group;
  at::Tensor tensor;

  void make_group(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int world_size) {
    name = join("rota/", num_groups++);
    const auto own_store = store->clone();
    own_store->setTimeout(kRendezvousTimeout);
    auto made = c10::make_intrusive<::c10d::ProcessGroup>(own_store, rank, world_size);
    ::c10d::register_process_group(name, made);
    group = std::move(made);
  }
  ~NamedMemory() {
    tensor.reset();
    if (group) ::c10d::unregister_process_group(name);
  }
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

// Regions that ranks write into, in torch's symmetric memory. It maps memory page by page, which
// also joins GPUs whose processes may not exchange CUDA IPC handles. Fails also where several ranks
// share a GPU without TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.
transport::DeviceRegions connect_by_symmetric_memory(const c10::intrusive_ptr<::c10d::Store>& store,
                                                     int rank, int world_size, at::Device device,
                                                     size_t num_bytes,
                                                     const transport::AllGatherText& all_gather) {
  const auto own = std::make_shared<NamedMemory>();
  const auto mapped = std::make_shared<Mapping>();
  check_same_number(all_gather);
  transport::agree(all_gather, rank, [&] {
    check_nvml();
    own->make_group(store, rank, world_size);
    own->tensor = symmetric::empty_strided_p2p({static_cast<int64_t>(num_bytes)}, {1}, at::kByte,
                                               device, own->name, std::nullopt);
    own->tensor.zero_();
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  });
  // torch's memory also refers to its mapping and counts who maps it: it is freed with the last
  // one.
  transport::DeviceRegions regions{
      .means = "torch's symmetric memory", .own = own, .mapped = mapped};
  transport::agree(all_gather, rank, [&] {
    *mapped = symmetric::rendezvous(own->tensor, own->name);
    for (void* buffer : (*mapped)->get_buffer_ptrs()) {
      regions.by_rank.push_back(static_cast<std::byte*>(buffer));
    }
  });
  return regions;
}

// How this rank's GPU reaches those of all other ranks.
schedule::Topology topology_to(const std::vector<transport::GpuIdentity>& gpus, int rank) {
  for (int peer = 0; peer < static_cast<int>(gpus.size()); ++peer) {
    if (peer == rank) continue;
    if (!transport::is_joined_by_nvlink(gpus[static_cast<size_t>(peer)])) {
      return schedule::Topology::kPcie;
    }
  }
  return schedule::Topology::kNvlink;
}

// Throws Error(kTransport) on every rank if the self-test finds a kernel that is wrong on any, or
// that does not finish.
void check_kernels(Communicator& communicator, at::Device device,
                   const transport::AllGatherText& all_gather) {
  constexpr char kFound = '+', kFailed = '!';
  std::string own;
  try {
    own = kFound + find_wrong_kernels(device);
  } catch (const pybind11::error_already_set&) {  // Ctrl-C
    communicator.abort(
        join("rank ", communicator.rank(), " was interrupted in the self-test of its GPU"));
    throw;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    own = kFailed + text.substr(0, text.find('\n'));
  }
  const std::vector<std::string> texts = all_gather(own);
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    const std::string text = texts[static_cast<size_t>(rank)].substr(1);
    if (texts[static_cast<size_t>(rank)][0] == kFailed) throw Error(ErrorKind::kTransport, text);
    if (text.empty()) continue;
    throw Error(
        ErrorKind::kTransport,
        join(text, " (on rank ", rank, "); `python -m rota doctor --gpu` tests all kernels again"));
  }
}

}  // namespace

void agree(Communicator& communicator, CallerThread thread, const std::function<void()>& body) {
  transport::agree(all_gather_over(communicator, thread), communicator.rank(), body);
}

transport::DeviceRegions connect_regions(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                         int world_size, at::Device device, size_t num_bytes,
                                         const transport::AllGatherText& all_gather) {
  const char* wish = std::getenv("ROTA_PEER_MEMORY");
  const std::string_view means = wish == nullptr ? "auto" : wish;
  if (means != "auto" && means != "symmetric" && means != "ipc") {
    throw Error(ErrorKind::kValue,
                join("rota: ROTA_PEER_MEMORY is '", means, "', expected auto, symmetric or ipc"));
  }
  if (means != "ipc") {
    try {
      return connect_by_symmetric_memory(store, rank, world_size, device, num_bytes, all_gather);
    } catch (const Error& error) {
      if (means == "symmetric" || error.kind() != ErrorKind::kTransport) throw;
    }
  }
  return transport::connect_by_ipc(rank, num_bytes, all_gather);
}

schedule::Tuning agree_on_tuning(Communicator& communicator, CallerThread thread) {
  const int rank = communicator.rank();
  const int world_size = communicator.world_size();
  const transport::AllGatherText all_gather = all_gather_over(communicator, thread);
  transport::GpuIdentity own{};
  transport::agree(all_gather, rank,
                   [&] { own = transport::identity_of_gpu(transport::current_gpu()); });
  if (world_size == 1) {
    return *schedule::find_tuning(own.name, schedule::Topology::kLocal, world_size);
  }
  std::vector<transport::GpuIdentity> gpus;
  for (const std::string& text : all_gather({reinterpret_cast<const char*>(&own), sizeof(own)})) {
    std::memcpy(&gpus.emplace_back(), text.data(), sizeof(own));
  }
  auto topology = schedule::Topology::kPcie;
  transport::agree(all_gather, rank, [&] { topology = topology_to(gpus, rank); });
  std::vector<schedule::GpuPlace> places;
  for (const std::string& text : all_gather(std::string(1, static_cast<char>(topology)))) {
    places.push_back({gpus[places.size()].name, static_cast<schedule::Topology>(text[0])});
  }
  const schedule::GpuPlace common = schedule::common_place(places);
  return *schedule::find_tuning(common.gpu, common.topology, world_size);
}

std::unique_ptr<JoinedRegions> join_gpus(Communicator& communicator,
                                         const c10::intrusive_ptr<::c10d::Store>& store,
                                         at::Device device, const schedule::Tuning& tuning,
                                         const transport::DeviceGeometry& geometry,
                                         CallerThread thread) {
  check_self_test_setting();
  const transport::AllGatherText all_gather = all_gather_over(communicator, thread);
  transport::agree(all_gather, communicator.rank(), cuda::load_kernels);
  // Before the GPUs are joined, so that a broken kernel is not blamed on the connection between two
  // GPUs.
  check_kernels(communicator, device, all_gather);
  if (communicator.world_size() == 1) {
    return std::make_unique<JoinedRegions>(communicator,
                                           transport::allocate_regions(1, geometry.num_bytes()));
  }
  auto regions = std::make_unique<JoinedRegions>(
      communicator, connect_regions(store, communicator.rank(), communicator.world_size(), device,
                                    geometry.num_bytes(), all_gather));
  verify(communicator, device, tuning, geometry, *regions, all_gather);
  return regions;
}

}  // namespace rota::tensors
