#include "c10d/cuda/join_gpus.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "c10d/cuda/native_stream.h"
#include "c10d/cuda/symmetric_memory.h"
#include "c10d/tensor_checks.h"
#include "cuda/executor.h"

namespace rota::c10d_glue {
namespace {

// How long a first message between GPUs may take.
constexpr auto kVerifyTimeout = std::chrono::seconds(10);

// Texts of any length up to a bound, by way of the CPU's all-gather.
transport::AllGatherText all_gather_over(Communicator& communicator, CallerThread thread) {
  struct Text {
    uint32_t length;
    char chars[2044];
  };
  return [&communicator, thread](const std::string& own) {
    const auto num_ranks = static_cast<size_t>(communicator.world_size());
    Text text{.length = static_cast<uint32_t>(std::min(own.size(), sizeof(Text::chars)))};
    std::memcpy(text.chars, own.data(), text.length);
    std::vector<Text> texts(num_ranks);
    std::vector<void*> places;
    for (Text& place : texts) places.push_back(&place);
    communicator.all_gather({&text, places.data(), sizeof(Text)}, DType::kUInt8, thread);
    std::vector<std::string> all;
    for (const Text& each : texts) {
      all.emplace_back(each.chars, std::min(size_t{each.length}, sizeof(Text::chars)));
    }
    return all;
  };
}

// By which means: as the environment says, or by the first of both that works.
transport::DeviceRegions connect_regions(const Communicator& communicator,
                                         const c10::intrusive_ptr<::c10d::Store>& store,
                                         at::Device device, size_t num_bytes,
                                         const transport::AllGatherText& all_gather) {
  const char* wish = std::getenv("ROTA_PEER_MEMORY");
  const std::string_view means = wish == nullptr ? "auto" : wish;
  if (means != "auto" && means != "symmetric" && means != "ipc") {
    throw Error(ErrorKind::kValue,
                join("rota: ROTA_PEER_MEMORY is '", means, "', expected auto, symmetric or ipc"));
  }
  if (means != "ipc") {
    try {
      return connect_by_symmetric_memory(store, communicator.rank(), communicator.world_size(),
                                         device, num_bytes, all_gather);
    } catch (const Error& error) {
      if (means == "symmetric" || error.kind() != ErrorKind::kTransport) throw;
    }
  }
  return transport::connect_by_ipc(communicator.rank(), num_bytes, all_gather);
}

// With the kernels that collectives use. Every pair, every channel: each rank's piece is
// a pattern of its own.
void verify(const Communicator& communicator, at::Device device,
            const transport::DeviceGeometry& geometry, const transport::DeviceRegions& regions,
            const transport::AllGatherText& all_gather) {
  const int rank = communicator.rank();
  const int world_size = communicator.world_size();
  const int64_t piece_bytes =
      int64_t{geometry.num_channels} * cuda::kThreadsPerBlock * cuda::kAccessBytes;
  const auto pattern_of = [&](int writer) {
    return at::arange(piece_bytes, at::kLong).add(writer * 37).remainder(251).to(at::kByte);
  };
  at::Tensor input, output;
  std::optional<cuda::Executor> executor;
  transport::agree(all_gather, rank, [&] {
    input = pattern_of(rank).to(device);
    output = at::empty({world_size * piece_bytes}, at::TensorOptions(at::kByte).device(device));
    executor.emplace(cuda::Executor::Options{
        .rank = rank,
        .geometry = geometry,
        .regions = regions.by_rank,
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
      if (received.narrow(0, peer * piece_bytes, piece_bytes).equal(pattern_of(peer))) continue;
      throw Error(ErrorKind::kTransport, join("read something else than rank ", peer, kCause));
    }
  });
}

}  // namespace

transport::DeviceRegions join_gpus(Communicator& communicator,
                                   const c10::intrusive_ptr<::c10d::Store>& store,
                                   at::Device device, const transport::DeviceGeometry& geometry,
                                   CallerThread thread) {
  const transport::AllGatherText all_gather = all_gather_over(communicator, thread);
  transport::agree(all_gather, communicator.rank(), cuda::load_kernels);
  if (communicator.world_size() == 1) return transport::allocate_regions(1, geometry.num_bytes());
  transport::DeviceRegions regions =
      connect_regions(communicator, store, device, geometry.num_bytes(), all_gather);
  verify(communicator, device, geometry, regions, all_gather);
  return regions;
}

}  // namespace rota::c10d_glue
