#include "base/cores.h"

#include <sched.h>

#include <array>

namespace rota {

int num_usable_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return 1;
  return CPU_COUNT(&cores);
}

std::vector<int> usable_cores() {
  constexpr int kMostCores = 8192;  // that Linux can be built for
  constexpr size_t kSetBytes = CPU_ALLOC_SIZE(kMostCores);
  alignas(cpu_set_t) std::array<char, kSetBytes> bytes{};
  auto* set = reinterpret_cast<cpu_set_t*>(bytes.data());
  std::vector<int> cores;
  if (sched_getaffinity(0, kSetBytes, set) != 0) return cores;
  for (int core = 0; core < kMostCores; ++core) {
    if (CPU_ISSET_S(static_cast<size_t>(core), kSetBytes, set)) cores.push_back(core);
  }
  return cores;
}

}  // namespace rota
