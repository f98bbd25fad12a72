#include "tensor/cuda/host_sums.h"

#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <thread>

#include "schedule/tuning.h"
#include "tensor/cuda/native_stream.h"
#include "transport/gpu_identity.h"

namespace rota::tensors {
namespace {

// The kernel uses no slots and waits for nobody; the executor asks for both.
constexpr size_t kSlotBytes = 4096;
constexpr auto kTimeout = std::chrono::seconds(1);

}  // namespace

HostSums::HostSums(int num_hosts, at::Device device) : num_hosts_(num_hosts), device_(device) {
  const transport::GpuIdentity gpu = transport::identity_of_gpu(device.index());
  schedule::Tuning tuning = *schedule::find_tuning(gpu.name, schedule::Topology::kLocal, num_hosts);
  tuning.slot_bytes = kSlotBytes;
  const transport::DeviceGeometry geometry =
      cuda::geometry_of(num_hosts, /*num_channels=*/1, tuning);
  regions_ = transport::allocate_regions(num_hosts, geometry.num_bytes());
  executor_ = std::make_unique<cuda::Executor>(cuda::Executor::Options{.rank = 0,
                                                                       .num_local_ranks = num_hosts,
                                                                       .tuning = tuning,
                                                                       .geometry = geometry,
                                                                       .regions = regions_.by_rank,
                                                                       .own_regions = regions_.own,
                                                                       .timeout = kTimeout});
}

HostSums::~HostSums() {
  try {
    const c10::DeviceGuard on_device(device_);
    while (!executor_->is_idle()) std::this_thread::yield();
    executor_.reset();
    regions_ = {};
  } catch (const std::exception&) {
    // The driver is gone, and with it all that ran.
  }
}

void HostSums::run(std::span<std::byte* const> contributions, uint64_t num_elems,
                   const WireFormat& wire, ReduceOp op, double divisor,
                   const schedule::SumOrder& order) {
  cuda::MappedTensors mapped{};
  cuda::LaunchRequest request{.kernel = cuda::Kernel::kTwoShotInPlace,
                              .num_elems = num_elems,
                              .format = wire,
                              .op = op,
                              .divisor = divisor,
                              .is_bucket = true,
                              .tensors = &mapped};
  for (size_t host = 0; host < contributions.size(); ++host) {
    request.input[host] = request.output[host] = mapped.of[host] = contributions[host];
  }
  cuda::set_order(request, order, num_hosts_);
  executor_->run(executor_->plan(request), current_stream(device_));
}

}  // namespace rota::tensors
