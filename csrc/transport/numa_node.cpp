#include "transport/numa_node.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/cores.h"
#include "base/error.h"

namespace rota::transport {

std::optional<int> numa_node_of(const std::vector<int>& cpus, const std::string& directory) {
  std::optional<int> found;
  int num_with_cpus = 0;
  std::error_code none;  // then there are no entries
  for (const auto& entry : std::filesystem::directory_iterator(directory, none)) {
    int number = 0;
    if (std::sscanf(entry.path().filename().c_str(), "node%d", &number) != 1) continue;
    auto cpulist = in_classic_locale<std::ifstream>(entry.path() / "cpulist");
    const std::vector<int> of_node = parse_cores(cpulist);
    if (of_node.empty()) continue;
    ++num_with_cpus;
    const auto is_of_node = [&](int cpu) {
      return std::ranges::find(of_node, cpu) != of_node.end();
    };
    if (std::ranges::all_of(cpus, is_of_node)) found = number;
  }
  return num_with_cpus < 2 || cpus.empty() ? std::nullopt : found;
}

NumaNode numa_node() {
  if (const char* text = std::getenv("ROTA_NUMA_NODE")) {
    int number = -1;
    const char* end = text + std::strlen(text);
    const auto [rest, error] = std::from_chars(text, end, number);
    if (error != std::errc() || rest != end || number < 0) {
      throw Error(ErrorKind::kTransport,
                  join("rota: ROTA_NUMA_NODE is '", text, "', expected a number, 0 or more"));
    }
    return {number, true};
  }
  return {numa_node_of(usable_cores(), "/sys/devices/system/node"), false};
}

}  // namespace rota::transport
