// Launches of rota's kernels. g++ has compiled the .cu files with device_block.h of this folder, so
// that each kernel is a function of its own mangled name; it is called by every thread of the grid.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <string_view>
#include <tuple>
#include <typeinfo>

#include "block.h"
#include "cuda/bucket_args.h"
#include "cuda/collective_args.h"
#include "cuda/peers.h"
#include "kernel_faults.h"
#include "kernel_launch.h"
#include "threads.h"

namespace simulated_gpu {
namespace {

// Blocks of one launch that run at the same time; the others follow in ascending order. A block may
// wait for those with its index, of other local ranks and of other launches: they come one after
// another, and there is a thread for each local rank.
constexpr int kBlocksAtOnce = rota::kMaxLocalRanks;

// The kernel's own name, as far as a thread's goes.
std::string short_name(const std::string& name) {
  constexpr std::string_view kNamespace = "rota::cuda::";
  return name.substr(name.find(kNamespace) + kNamespace.size(), 15);
}

void run_grid(const Grid& grid, const std::string& name, const std::function<void()>& kernel) {
  if (is_named_by("SIMULATED_GPU_HANG", name)) hang();
  const bool deserts = is_named_by("SIMULATED_GPU_DESERT", name);
  std::atomic<int> next = 0;
  Residency& residency = *grid.residency;
  const int num_blocks = grid.num_blocks * grid.num_local_ranks;
  const std::string thread_name = short_name(name);
  const auto run_blocks = [&] {
    pthread_setname_np(pthread_self(), thread_name.c_str());
    for (int number = next++; number < num_blocks; number = next++) {
      const Block::Shape shape{.index = number / grid.num_local_ranks,
                               .num_blocks = grid.num_blocks,
                               .local_rank = number % grid.num_local_ranks,
                               .num_threads = grid.num_threads};
      if (deserts && shape.local_rank == 0) continue;
      const uint64_t seed = rota::test::mix(grid.seed) + static_cast<uint64_t>(number);
      if (!grid.is_cooperative) residency.take(grid.block_room);
      Block(shape, seed, grid.max_nap_us, name).run(kernel);
      residency.give_back(grid.block_room);
    }
  };
  if (grid.is_cooperative) residency.take(num_blocks * grid.block_room);
  std::vector<std::thread> threads;
  for (int i = 1; i < std::min(num_blocks, kBlocksAtOnce); ++i) {
    threads.push_back(start_thread(run_blocks));
  }
  run_blocks();
  for (std::thread& thread : threads) thread.join();
}

template <typename... Args>
Task prepare(const KernelLaunch& launch, void* function) {
  auto* const kernel = reinterpret_cast<void (*)(Args...)>(function);
  const auto copies = [&]<size_t... i>(std::index_sequence<i...>) {
    return std::tuple<Args...>(*static_cast<Args*>(launch.args[i])...);
  }(std::index_sequence_for<Args...>{});
  return [grid = launch.grid, name = std::string(launch.name), kernel, copies] {
    run_grid(grid, name, [&] { std::apply(kernel, copies); });
    if (!is_named_by("SIMULATED_GPU_FLIP_BIT", name)) return;
    std::byte* const result =
        std::apply([](const auto&... args) { return first_result(args...); }, copies);
    if (result != nullptr) *result ^= std::byte{1};
  };
}

// A list of parameters, as it ends a kernel's name, and how such a kernel is called.
struct Signature {
  std::string parameters;
  Task (*prepare)(const KernelLaunch& launch, void* function);
};

template <typename... Args>
Signature signature() {
  std::string parameters;
  ((parameters += (parameters.empty() ? "(" : ", ") + demangled(typeid(Args).name())), ...);
  return {parameters + ")", &prepare<Args...>};
}

const std::vector<Signature>& signatures() {
  static const std::vector<Signature> all{
      signature<rota::cuda::Peers, rota::cuda::CollectiveArgs>(),
      signature<rota::cuda::Peers, rota::cuda::CollectiveArgs, rota::cuda::MappedTensors>(),
      signature<rota::cuda::PackArgs>(),
      signature<rota::cuda::UnpackArgs>(),
  };
  return all;
}

// Symbols of this library.
void* find_function(const char* mangled) {
  static void* const self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&run_grid), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  return dlsym(self, mangled);
}

// Null where none is known.
const Signature* find_signature(std::string_view name) {
  for (const Signature& signature : signatures()) {
    if (name.ends_with(signature.parameters)) return &signature;
  }
  return nullptr;
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;

extern "C" void simulated_gpu_prepare_kernel(const KernelLaunch& launch, Task* task) {
  void* const function = find_function(launch.mangled);
  const Signature* const signature = find_signature(launch.name);
  if (function != nullptr && signature != nullptr) *task = signature->prepare(launch, function);
}

extern "C" bool simulated_gpu_has_kernel(const char* mangled, const char* name) {
  return find_function(mangled) != nullptr && find_signature(name) != nullptr;
}
