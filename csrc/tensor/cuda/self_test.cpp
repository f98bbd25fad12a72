#include "tensor/cuda/self_test.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdlib>

#include "cuda/device_info.h"
#include "tensor/cuda/native_stream.h"
#include "tensor/cuda/self_test_record.h"
#include "tensor/cuda/self_test_sums.h"
#include "tensor/cuda/self_test_trials.h"
#include "tensor/gil.h"
#include "tensor/signals.h"

namespace rota::tensors {
namespace {

using Clock = std::chrono::steady_clock;
// The first finding about each kernel and format, by number in tested_kernels().
using Findings = std::map<size_t, std::string>;

// How long a kernel waits for another rank's block of the same launch: microseconds if all works.
constexpr auto kKernelTimeout = std::chrono::seconds(5);
// How long the host waits for all launches of one kernel, which may share the GPU with others.
constexpr auto kHostTimeout = std::chrono::seconds(10);
constexpr auto kPoll = std::chrono::microseconds(50);
constexpr auto kSignalPoll = std::chrono::milliseconds(100);

// Slots are small, so that short tensors take several messages; packets hold a whole tensor.
constexpr transport::DeviceGeometry kGeometry{.world_size = kSelfTestRanks,
                                              .num_channels = 2,
                                              .slot_bytes = 4 << 10,
                                              .packet_bytes = 32 << 10};

enum class Setting : uint8_t { kOnce, kAlways, kNever };

Setting read_setting() {
  const char* wish = std::getenv("ROTA_GPU_SELF_TEST");
  const std::string_view text = wish == nullptr ? "once" : wish;
  if (text == "once") return Setting::kOnce;
  if (text == "always") return Setting::kAlways;
  if (text == "never") return Setting::kNever;
  throw Error(ErrorKind::kValue,
              join("rota: ROTA_GPU_SELF_TEST is '", text, "', expected once, always or never"));
}

// Memory from torch's allocator, which takes it back without waiting for the GPU.
at::Tensor zeros_on(at::Device device, size_t num_bytes) {
  const auto options = at::TensorOptions(at::kByte).device(device);
  return at::empty({static_cast<int64_t>(num_bytes)}, options).zero_();
}

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

cuda::Executor::Options executor_options(const at::Tensor& regions) {
  std::vector<std::byte*> by_rank;
  for (size_t rank = 0; rank < kSelfTestRanks; ++rank) {
    by_rank.push_back(data_of(regions) + rank * kGeometry.num_bytes());
  }
  return {.rank = 0,
          .num_local_ranks = kSelfTestRanks,
          .tuning = *schedule::find_tuning("", schedule::Topology::kLocal, kSelfTestRanks),
          .geometry = kGeometry,
          .regions = std::move(by_rank),
          .timeout = kKernelTimeout};
}

// The memory that the self-test's kernels use. They run on the current stream, which must stay the
// same.
class Bench {
 public:
  explicit Bench(at::Device device)
      : device_(device),
        regions_(zeros_on(device, kSelfTestRanks * kGeometry.num_bytes())),
        executor_(executor_options(regions_)) {}

  // Queues all trials and waits for their end; returns their memory. Throws Error(kTransport) if
  // they do not end, or end at their deadline.
  std::vector<std::byte> run(const Trials& trials, std::string_view kernel, Findings& findings);

 private:
  // Whether queued work ends before the deadline. Throws what a signal's handler raises.
  bool ends_in_time();

  at::Device device_;
  at::Tensor regions_;
  at::Tensor memory_;  // of the trials that run
  cuda::Executor executor_;
};

bool Bench::ends_in_time() {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  c10::Event end(device_.type());
  end.record(guard.getStream(device_));
  const auto deadline = Clock::now() + kHostTimeout;
  for (auto next_signals = Clock::now(); !end.query(); std::this_thread::sleep_for(kPoll)) {
    const auto now = Clock::now();
    if (now > deadline) return false;
    // After a failure the links are out of step, so each later kernel would wait as long.
    if (executor_.failure()) executor_.abort();
    if (now < next_signals) continue;
    check_python_signals();
    next_signals = now + kSignalPoll;
  }
  return true;
}

std::vector<std::byte> Bench::run(const Trials& trials, std::string_view kernel,
                                  Findings& findings) {
  const auto num_bytes = static_cast<int64_t>(trials.before.size());
  memory_ = at::empty({num_bytes}, regions_.options());
  // from_blob() takes no const pointer; the source of the copy is only read.
  memory_.copy_(
      at::from_blob(const_cast<std::byte*>(trials.before.data()), {num_bytes}, at::kByte));
  for (const Trial& trial : trials.trials) {
    try {
      trial.launch(data_of(memory_), executor_, current_stream(device_));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kValue) throw;
      findings.emplace(trial.number, error.what());  // this GPU has no room for its blocks
    }
  }
  if (!ends_in_time()) {
    throw Error(ErrorKind::kTransport, join(kernel, " has not come to an end within ",
                                            std::chrono::seconds(kHostTimeout).count(), " s"));
  }
  if (const auto failure = executor_.failure()) {
    throw Error(
        ErrorKind::kTransport,
        join(kernel, " gave up: rank ", failure->rank, " of one launch waited ",
             std::chrono::milliseconds(kKernelTimeout).count(), " ms for rank ", failure->peer));
  }
  std::vector<std::byte> after(trials.before.size());
  at::from_blob(after.data(), {num_bytes}, at::kByte).copy_(memory_);
  return after;
}

void compare(const Trials& trials, const std::vector<std::byte>& after, Findings& findings) {
  for (const Trial& trial : trials.trials) {
    for (const TrialResult& result : trial.results) {
      const std::string difference = find_difference(result, after, trials.expected);
      if (difference.empty()) continue;
      findings.emplace(trial.number, difference);
      break;
    }
  }
}

std::vector<KernelReport> test_kernels(Bench& bench) {
  std::vector<KernelReport> reports;
  const std::vector<TestedKernel>& tested = tested_kernels();
  for (size_t begin = 0, end = 0; begin < tested.size(); begin = end) {
    const std::string kernel(tested[begin].kernel());
    while (end < tested.size() && tested[end].kernel() == kernel) ++end;
    const Trials trials = make_trials(begin, end);
    const auto start = Clock::now();
    Findings findings;
    compare(trials, bench.run(trials, kernel, findings), findings);
    const std::chrono::duration<double, std::milli> duration = Clock::now() - start;
    std::vector<std::string> texts;
    for (const auto& [number, finding] : findings) {
      texts.push_back(join(tested[number].to_string(), ": ", finding));
    }
    reports.push_back({kernel, end - begin, std::move(texts), duration.count()});
  }
  return reports;
}

std::vector<std::string> findings_of(const std::vector<KernelReport>& reports) {
  std::vector<std::string> all;
  for (const KernelReport& report : reports) {
    all.insert(all.end(), report.findings.begin(), report.findings.end());
  }
  return all;
}

std::string title(const cuda::GpuInfo& gpu) {
  return join("rota: self-test of ", gpu.name, " (driver ", gpu.driver, ")");
}

std::vector<KernelReport> run(at::Device device, const cuda::GpuInfo& gpu) {
  const c10::DeviceGuard on_device(device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::StreamGuard on_stream(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/false));
  auto bench = std::make_unique<Bench>(device);
  try {
    std::vector<KernelReport> reports = test_kernels(*bench);
    write_self_test_record(gpu, findings_of(reports));
    return reports;
  } catch (const Error& error) {
    bench.release();  // a kernel may still be writing to it, so it is never freed
    throw Error(error.kind(), join(title(gpu), ": ", error.what()));
  } catch (...) {
    bench.release();
    throw;
  }
}

// What this process knows of one GPU.
struct Known {
  std::vector<std::string> findings;
  std::optional<Error> failure;  // of the test itself
};

struct Process {
  std::mutex mutex;
  std::map<int, Known> by_device;
};

Process& process() {
  static auto* const one = new Process;  // never destroyed: kernels may still run at the end
  return *one;
}

Known find_out(at::Device device, Setting setting) {
  if (setting == Setting::kNever) return {};
  const cuda::GpuInfo gpu = cuda::gpu_info(device.index());
  if (setting == Setting::kOnce) {
    if (auto recorded = read_self_test_record(gpu)) return {std::move(*recorded), {}};
  }
  try {
    return {findings_of(run(device, gpu)), {}};
  } catch (const Error& error) {
    return {{}, error};
  }
}

}  // namespace

void check_self_test_setting() { read_setting(); }

std::string find_wrong_kernels(at::Device device) {
  const Setting setting = read_setting();
  // Held while the test runs, so that other threads wait for its result. The GIL is not held.
  const GilFreeLock lock(process().mutex);
  auto& by_device = process().by_device;
  if (!by_device.contains(device.index())) {
    by_device.emplace(device.index(), find_out(device, setting));
  }
  const auto& [findings, failure] = by_device.at(device.index());
  if (failure) throw *failure;
  if (findings.empty()) return "";
  const std::string rest = findings.size() == 1 ? "" : join("; and ", findings.size() - 1, " more");
  return join(title(cuda::gpu_info(device.index())), ": ", findings[0], rest);
}

std::vector<KernelReport> run_gpu_self_test(int device) {
  const cuda::GpuInfo gpu = cuda::gpu_info(device);
  const at::Device tested(at::kCUDA, static_cast<c10::DeviceIndex>(device));
  const c10::DeviceGuard on_device(tested);
  cuda::load_kernels();
  const GilFreeLock lock(process().mutex);
  return run(tested, gpu);
}

std::optional<std::vector<std::string>> recorded_gpu_self_test(int device) {
  return read_self_test_record(cuda::gpu_info(device));
}

}  // namespace rota::tensors
