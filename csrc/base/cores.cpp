#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <fstream>

#include "base/error.h"

namespace rota {
std::vector<int> usable_cores() {
  constexpr int kMostCores = 8192;  // that Linux can be built for
  constexpr size_t kNumBytes = CPU_ALLOC_SIZE(kMostCores);
  alignas(cpu_set_t) std::array<char, kNumBytes> bytes{};
  auto* set = reinterpret_cast<cpu_set_t*>(bytes.data());
  std::vector<int> cores;
  if (sched_getaffinity(0, kNumBytes, set) != 0) return cores;
  for (int core = 0; core < kMostCores; ++core) {
    if (CPU_ISSET_S(static_cast<size_t>(core), kNumBytes, set)) cores.push_back(core);
  }
  return cores;
}

std::vector<int> parse_cores(std::istream& list) {
  std::vector<int> cores;
  for (int first = 0; list >> first;) {
    int last = first;
    if (list.peek() == '-') list.ignore() >> last;
    for (int core = first; core <= last; ++core) cores.push_back(core);
    if (list.peek() == ',') list.ignore();
  }
  return cores;
}

uint64_t last_level_cache_bytes() {
  static const uint64_t num_bytes = [] {
    const std::vector<int> cores = usable_cores();
    const uint64_t found =
        cores.empty() ? 0 : last_level_cache_bytes("/sys/devices/system/cpu", cores.front());
    return found != 0 ? found : uint64_t{32} << 20;  // some containers do not say
  }();
  return num_bytes;
}

uint64_t last_level_cache_bytes(const std::string& directory, int core) {
  auto online_list = in_classic_locale<std::ifstream>(directory + "/online");
  const size_t num_online = parse_cores(online_list).size();
  const std::string caches = directory + "/cpu" + std::to_string(core) + "/cache/index";
  uint64_t num_bytes = 0;
  // Indices ascend with the levels.
  for (int index = 0;; ++index) {
    const std::string cache = caches + std::to_string(index);
    auto size = in_classic_locale<std::ifstream>(cache + "/size");
    uint64_t num_kibibytes = 0;
    if (!(size >> num_kibibytes)) return num_bytes;
    auto sharers_list = in_classic_locale<std::ifstream>(cache + "/shared_cpu_list");
    const size_t num_sharers = std::max(parse_cores(sharers_list).size(), size_t{1});
    num_bytes = (num_kibibytes << 10) * std::max(num_online / num_sharers, size_t{1});
  }
}

int num_usable_cores() { return std::max(1, static_cast<int>(usable_cores().size())); }

}  // namespace rota
