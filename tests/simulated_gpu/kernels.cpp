// Kernels: nvcc's start-up code registers them by name, and launches name them by the address that
// stands for them on the host.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string_view>
#include <unordered_map>

#include "capture.h"
#include "cpp/random.h"
#include "devices.h"
#include "kernel_launch.h"
#include "libraries.h"
#include "result.h"
#include "settings.h"

namespace simulated_gpu {
namespace {

// What a multiprocessor has room for; rota's kernels are compiled for 512 threads of 128 registers.
constexpr int kResidentThreads = 512;
constexpr int kMostThreads = 1024;
constexpr int kRegisters = 128;

struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> mangled_names;  // by the address on the host
  std::set<std::pair<int, const void*>> loaded;                // by device
  uint64_t num_launches = 0;
};

// Never destroyed: libraries register kernels before main() and unregister them after it.
Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

const char* mangled_name(const void* kernel) {
  Registry& all = registry();
  const std::lock_guard guard(all.mutex);
  const auto place = all.mangled_names.find(kernel);
  require(place != all.mangled_names.end(), cudaErrorInvalidDeviceFunction,
          "no kernel is registered at this address");
  return place->second;
}

// A kernel's code is loaded when it is first asked for, for which the device comes to rest: who
// does so while kernels wait for the launch of that one stands still.
void load(const void* kernel) {
  Registry& all = registry();
  {
    const std::lock_guard guard(all.mutex);
    if (!all.loaded.insert({current_device(), kernel}).second) return;
  }
  wait_for_device(current_device());
}

uint64_t count_launch() {
  const std::lock_guard guard(registry().mutex);
  return ++registry().num_launches;
}

bool is_rotas(std::string_view name) { return name.find("rota::cuda::") != name.npos; }

void* rota_kernels() {
  static void* const library = load_beside(kKernelsLibrary);
  return library;
}

// vectorized_elementwise_kernel<vec_size, FillFunctor<scalar>, array>(int num_elems, FillFunctor
// value, array of the one output): fill_() of a contiguous tensor.
constexpr std::string_view kFill = "at::native::vectorized_elementwise_kernel<";
constexpr std::string_view kFunctor = "at::native::FillFunctor<";

struct Scalar {
  std::string_view name;
  size_t num_bytes;
};
constexpr std::array kScalars{
    Scalar{"float", 4},
    Scalar{"double", 8},
    Scalar{"c10::Half", 2},
    Scalar{"c10::BFloat16", 2},
    Scalar{"bool", 1},
    Scalar{"unsigned char", 1},
    Scalar{"signed char", 1},
    Scalar{"short", 2},
    Scalar{"int", 4},
    Scalar{"long", 8},
    Scalar{"unsigned short", 2},
    Scalar{"unsigned int", 4},
    Scalar{"unsigned long", 8},
    Scalar{"c10::Float8_e4m3fn", 1},
    Scalar{"c10::Float8_e5m2", 1},
    Scalar{"c10::complex<float>", 8},
    Scalar{"c10::complex<double>", 16},
};

size_t scalar_bytes(std::string_view name) {
  for (const Scalar& scalar : kScalars) {
    if (!name.starts_with(scalar.name)) continue;
    const std::string_view rest = name.substr(scalar.name.size());
    if (rest.starts_with(">") || rest.starts_with(" >")) return scalar.num_bytes;
  }
  return 0;
}

// The few kernels of torch that stand in here for their like: no task where this is none of them.
Task prepare_torch_kernel(std::string_view name, void** args) {
  const size_t functor = name.find(kFunctor);
  if (name.find(kFill) == std::string_view::npos || functor == std::string_view::npos) return {};
  const size_t elem_bytes = scalar_bytes(name.substr(functor + kFunctor.size()));
  if (elem_bytes == 0) return {};
  const auto num_elems = static_cast<size_t>(*static_cast<const int*>(args[0]));
  std::array<std::byte, 16> value{};
  std::memcpy(value.data(), args[1], elem_bytes);
  auto* dst = *static_cast<std::byte* const*>(args[2]);
  return [=] {
    for (size_t i = 0; i < num_elems; ++i) {
      std::memcpy(dst + i * elem_bytes, value.data(), elem_bytes);
    }
  };
}

Task prepare(const KernelLaunch& launch) {
  Task task;
  const std::string_view name = launch.name;
  if (is_rotas(name)) {
    reinterpret_cast<PrepareKernel*>(dlsym(rota_kernels(), kPrepareKernel))(launch, &task);
  } else {
    task = prepare_torch_kernel(name, launch.args);
  }
  if (task == nullptr) {
    fail_unsupported("the kernel " + std::string(name) +
                     " cannot run here, only rota's own can; make data on the CPU and copy it");
  }
  return task;
}

// Never destroyed: kernels may run while the process ends.
Residency& residency_of(int device) {
  static const auto* all = [] {
    auto* made = new std::vector<std::unique_ptr<Residency>>;
    for (int i = 0; i < num_devices(); ++i) {
      made->push_back(
          std::make_unique<Residency>(settings().num_multiprocessors * kResidentThreads));
    }
    return made;
  }();
  return *(*all)[static_cast<size_t>(device)];
}

void launch(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared_bytes,
            cudaStream_t stream_handle, bool is_cooperative = false) {
  check_device(current_device());
  const char* mangled = mangled_name(kernel);
  const std::string name = demangled(mangled);
  const unsigned num_threads = block.x * block.y * block.z;
  require(grid.x != 0 && grid.y != 0 && grid.z != 0 && num_threads != 0,
          cudaErrorInvalidConfiguration);
  require(num_threads <= kMostThreads, cudaErrorInvalidConfiguration);
  require(shared_bytes <= 227 * 1024, cudaErrorInvalidValue);
  Residency& residency = residency_of(current_device());
  // A multiprocessor has as many blocks as cudaOccupancyMaxActiveBlocksPerMultiprocessor says.
  const int room = std::min(static_cast<int>(num_threads), kResidentThreads);
  if (is_cooperative) {
    require(settings().has_cooperative_launch, cudaErrorNotSupported);
    require(uint64_t{grid.x} * grid.y * grid.z * static_cast<uint64_t>(room) <=
                static_cast<uint64_t>(residency.room()),
            cudaErrorCooperativeLaunchTooLarge);
  }
  const KernelLaunch what{
      .mangled = mangled,
      .name = name.c_str(),
      .args = args,
      .grid = {.num_blocks = static_cast<int>(grid.x),
               .num_local_ranks = static_cast<int>(grid.y),
               .num_threads = std::min(static_cast<int>(num_threads), settings().threads_per_block),
               .residency = &residency,
               .block_room = room,
               .is_cooperative = is_cooperative,
               .seed = rota::test::mix(settings().seed) + count_launch(),
               .max_nap_us = settings().max_nap_us}};
  const Task task = prepare(what);
  load(kernel);
  const std::lock_guard guard(runtime_mutex());
  Stream& stream = stream_of(stream_handle);
  require(stream.device() == current_device(), cudaErrorInvalidResourceHandle,
          "the stream is of another device than the current one");
  submit(stream, {cudaGraphNodeTypeKernel, [=] { return task; }});
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
// What kernel<<<...>>> names: pushed by the caller, popped by the kernel's stub.
thread_local std::vector<Configuration> configurations;

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;

// What nvcc's start-up code calls.

extern "C" void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
extern "C" void __cudaRegisterFatBinaryEnd(void**) {}
extern "C" void __cudaUnregisterFatBinary(void**) {}
extern "C" void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
extern "C" void __cudaRegisterFunction(void**, const char* kernel, char* mangled, const char*, int,
                                       uint3*, uint3*, dim3*, dim3*, int*) {
  const std::lock_guard guard(registry().mutex);
  registry().mangled_names[kernel] = mangled;
}

// What its stubs call. A kernel's handle is its address on the host.

extern "C" cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  *handle = reinterpret_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
extern "C" unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                cudaStream_t stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
extern "C" cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                                  void* stream) {
  const Configuration& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}
extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                          size_t shared_bytes, cudaStream_t stream) {
  return call([&] { launch(kernel, grid, block, args, shared_bytes, stream); });
}

extern "C" cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args,
                                        size_t shared_bytes, cudaStream_t stream) {
  return call([&] { launch(kernel, grid, block, args, shared_bytes, stream); });
}

extern "C" cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block,
                                                   void** args, size_t shared_bytes,
                                                   cudaStream_t stream) {
  return call([&] { launch(kernel, grid, block, args, shared_bytes, stream, true); });
}

// Other attributes are hints, or what is not simulated: clusters, programmatic launches.
extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                           void** args) {
  return call([&] {
    const bool is_cooperative = std::any_of(
        config->attrs, config->attrs + config->numAttrs, [](const cudaLaunchAttribute& attribute) {
          return attribute.id == cudaLaunchAttributeCooperative && attribute.val.cooperative != 0;
        });
    launch(kernel, config->gridDim, config->blockDim, args, config->dynamicSmemBytes,
           config->stream, is_cooperative);
  });
}

extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  return call([&] {
    check_device(current_device());
    mangled_name(kernel);
    load(kernel);
    std::memset(attributes, 0, sizeof(*attributes));
    attributes->numRegs = kRegisters;
    attributes->maxThreadsPerBlock = kResidentThreads;
    attributes->binaryVersion = 90;
    attributes->ptxVersion = 90;
  });
}

extern "C" cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int) {
  return call([&] { mangled_name(kernel); });
}

extern "C" cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num_blocks,
                                                                              const void* kernel,
                                                                              int num_threads,
                                                                              size_t, unsigned) {
  return call([&] {
    check_device(current_device());
    mangled_name(kernel);
    load(kernel);
    *num_blocks = num_threads > kMostThreads ? 0 : std::max(1, kResidentThreads / num_threads);
  });
}

extern "C" cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks,
                                                                     const void* kernel,
                                                                     int num_threads,
                                                                     size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num_blocks, kernel, num_threads,
                                                                shared_bytes, cudaOccupancyDefault);
}

// For tests, of rota's kernels that have been registered: how many there are, and how many of them
// can run.
extern "C" void simulated_gpu_count_kernels(int* num_registered, int* num_known) {
  const std::lock_guard guard(registry().mutex);
  auto* const has_kernel = reinterpret_cast<HasKernel*>(dlsym(rota_kernels(), kHasKernel));
  *num_registered = 0;
  *num_known = 0;
  for (const auto& [kernel, mangled] : registry().mangled_names) {
    const std::string name = demangled(mangled);
    if (!is_rotas(name)) continue;
    ++*num_registered;
    if (has_kernel(mangled, name.c_str())) {
      ++*num_known;
    } else {
      std::fprintf(stderr, "simulated GPU: unknown kernel %s\n", name.c_str());
    }
  }
}
