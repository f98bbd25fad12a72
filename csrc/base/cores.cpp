#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <array>

namespace rota {

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

int num_usable_cores() { return std::max(1, static_cast<int>(usable_cores().size())); }

}  // namespace rota
