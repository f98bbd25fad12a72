#include "transport/available_memory.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace rota::transport {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The files of a memory controller; their names differ between cgroup versions.
struct Controller {
  fs::path mount;
  fs::path path;  // of this process's cgroup, below the mount
  const char* limit;
  const char* usage;
  std::string_view droppable;  // a key in memory.stat
};

// The number after `key` in a file of lines "key number"; none if the key is missing.
std::optional<uint64_t> number_in(const fs::path& file, std::string_view key) {
  auto stream = in_classic_locale<std::ifstream>(file);
  std::string word;
  while (stream >> word) {
    uint64_t number = 0;
    if (word == key && stream >> number) return number;
  }
  return std::nullopt;
}

// None for "max" and for a missing file.
std::optional<uint64_t> number_in(const fs::path& file) {
  auto stream = in_classic_locale<std::ifstream>(file);
  uint64_t number = 0;
  if (stream >> number) return number;
  return std::nullopt;
}

// Lines are "7:memory:/path" in version 1 and "0::/path" in version 2; a system may have both.
std::vector<Controller> memory_controllers() {
  const fs::path root = "/sys/fs/cgroup";
  std::vector<Controller> controllers;
  std::ifstream stream("/proc/self/cgroup");
  for (std::string line; std::getline(stream, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = ',' + line.substr(first + 1, second - first - 1) + ',';
    const fs::path path = fs::path(line.substr(second + 1)).relative_path();
    if (names == ",,") {
      controllers.push_back({root, path, "memory.max", "memory.current", "inactive_file"});
    } else if (names.find(",memory,") != std::string::npos) {
      controllers.push_back({root / "memory", path, "memory.limit_in_bytes",
                             "memory.usage_in_bytes", "total_inactive_file"});
    }
  }
  return controllers;
}

uint64_t left_in(const fs::path& cgroup, const Controller& controller) {
  constexpr uint64_t kNoLimit = uint64_t{1} << 62;  // version 1 writes a huge number for it
  const auto limit = number_in(cgroup / controller.limit);
  if (!limit || *limit >= kNoLimit) return kUnlimited;
  const auto usage = number_in(cgroup / controller.usage);
  if (!usage) return kUnlimited;
  const uint64_t droppable = number_in(cgroup / "memory.stat", controller.droppable).value_or(0);
  const uint64_t held = *usage - std::min(*usage, droppable);
  return *limit - std::min(*limit, held);
}

uint64_t left_below(const Controller& controller) {
  // In a container the path may be the host's, while the mount already is the container's own.
  std::error_code error;
  fs::path path =
      fs::is_directory(controller.mount / controller.path, error) ? controller.path : "";
  uint64_t left = left_in(controller.mount / path, controller);
  while (!path.empty()) {
    path = path.parent_path();
    left = std::min(left, left_in(controller.mount / path, controller));
  }
  return left;
}

}  // namespace

uint64_t available_memory() {
  uint64_t left = kUnlimited;
  if (const auto kibibytes = number_in("/proc/meminfo", "MemAvailable:")) left = *kibibytes * 1024;
  for (const Controller& controller : memory_controllers()) {
    left = std::min(left, left_below(controller));
  }
  return left;
}

}  // namespace rota::transport
