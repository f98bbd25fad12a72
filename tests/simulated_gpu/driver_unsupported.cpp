#include "driver_unsupported.h"

#include <array>
#include <map>
#include <mutex>

#include "result.h"

namespace simulated_gpu {
namespace {

int fail_as_unsupported(const std::string& name) {
  return call([&] { fail_unsupported("the driver's function " + name); });
}

// One function for each name that is asked for.
constexpr size_t kMostNames = 256;
std::array<std::string, kMostNames> names;

template <size_t kIndex>
int unsupported() {
  return fail_as_unsupported(names[kIndex]);
}

template <size_t... kIndices>
constexpr auto make_table(std::index_sequence<kIndices...>) {
  return std::array<int (*)(), sizeof...(kIndices)>{&unsupported<kIndices>...};
}

}  // namespace

void* unsupported_function(const std::string& name) {
  static constexpr auto kTable = make_table(std::make_index_sequence<kMostNames>{});
  static std::mutex mutex;
  static auto* places = new std::map<std::string, size_t>;
  const std::lock_guard guard(mutex);
  const size_t place = places->emplace(name, places->size()).first->second;
  require(place < kMostNames, cudaErrorNotSupported);
  names[place] = name;
  return reinterpret_cast<void*>(kTable[place]);
}

}  // namespace simulated_gpu

using namespace simulated_gpu;

// What torch's libcaffe2_nvrtc.so is linked to. cuda.h, which has other types for them, is not
// included here.
extern "C" int cuFuncGetAttribute() { return fail_as_unsupported(__func__); }
extern "C" int cuFuncSetAttribute() { return fail_as_unsupported(__func__); }
extern "C" int cuFuncSetCacheConfig() { return fail_as_unsupported(__func__); }
extern "C" int cuLaunchCooperativeKernel() { return fail_as_unsupported(__func__); }
extern "C" int cuLaunchKernel() { return fail_as_unsupported(__func__); }
extern "C" int cuLinkAddData_v2() { return fail_as_unsupported(__func__); }
extern "C" int cuLinkComplete() { return fail_as_unsupported(__func__); }
extern "C" int cuLinkCreate_v2() { return fail_as_unsupported(__func__); }
extern "C" int cuModuleGetFunction() { return fail_as_unsupported(__func__); }
extern "C" int cuModuleLoad() { return fail_as_unsupported(__func__); }
extern "C" int cuModuleLoadData() { return fail_as_unsupported(__func__); }
extern "C" int cuModuleLoadDataEx() { return fail_as_unsupported(__func__); }
extern "C" int cuModuleUnload() { return fail_as_unsupported(__func__); }
extern "C" int cuOccupancyMaxActiveBlocksPerMultiprocessor() {
  return fail_as_unsupported(__func__);
}
extern "C" int cuTensorMapEncodeTiled() { return fail_as_unsupported(__func__); }
