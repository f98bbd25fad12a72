#include "transport/place.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "base/cores.h"
#include "base/error.h"
#include "transport/unique_fd.h"

namespace rota::transport {
namespace {

// Empty if the system has none. Any other failure to read it, such as a lack of descriptors,
// throws, because an empty id would look like another host.
std::string boot_id() {
  const UniqueFd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  char id[64];
  const ssize_t size = file.get() < 0 ? -1 : read(file.get(), id, sizeof(id));
  if (size < 0 && errno != ENOENT) {
    fail_transport(join(with_errno("cannot read this host's boot id", errno),
                        errno == EMFILE ? "; raise `ulimit -n`" : ""));
  }
  const std::string_view text(id, static_cast<size_t>(std::max(size, ssize_t{0})));
  return std::string(text.substr(0, text.find('\n')));
}

}  // namespace

std::string host_id() {
  if (const char* id = std::getenv("ROTA_HOST_ID")) {
    // It becomes the end of a line (Bootstrap).
    if (std::strchr(id, '\n') == nullptr) return id;
    fail_transport(join("ROTA_HOST_ID is '", id, "', expected text without a line break"));
  }
  char network[64] = {};
  if (readlink("/proc/self/ns/net", network, sizeof(network) - 1) < 0) network[0] = '\0';
  return join(boot_id(), "/", network);
}

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
      fail_transport(join("ROTA_NUMA_NODE is '", text, "', expected a number, 0 or more"));
    }
    return {number, true};
  }
  return {numa_node_of(usable_cores(), "/sys/devices/system/node"), false};
}

}  // namespace rota::transport
