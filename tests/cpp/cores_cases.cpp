// What the kernel says of cores and caches.
#include "base/cores.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"

namespace rota::test {
namespace {

namespace fs = std::filesystem;

void lists_of_cores_are_read() {
  const auto parsed = [](const std::string& list) {
    std::istringstream stream(list);
    return parse_cores(stream);
  };
  check(parsed("0\n") == std::vector{0}, "one");
  check(parsed("0-2,8\n") == std::vector{0, 1, 2, 8}, "a range and one");
  check(parsed("\n").empty(), "none");
}

struct Cache {
  std::string size;
  std::string sharers;
};

// Of core 2, which has these caches; indices ascend with the levels.
uint64_t found_with(const std::string& online, const std::vector<Cache>& caches) {
  std::string name = (fs::temp_directory_path() / "rota-caches-XXXXXX").string();
  check(mkdtemp(name.data()) != nullptr, "a directory");
  std::ofstream(fs::path(name) / "online") << online << '\n';
  for (size_t index = 0; index < caches.size(); ++index) {
    const fs::path directory = fs::path(name) / "cpu2" / "cache" / join("index", index);
    fs::create_directories(directory);
    std::ofstream(directory / "size") << caches[index].size << '\n';
    std::ofstream(directory / "shared_cpu_list") << caches[index].sharers << '\n';
  }
  const uint64_t num_bytes = last_level_cache_bytes(name, 2);
  fs::remove_all(name);
  return num_bytes;
}

void last_level_caches_are_counted_once() {
  const Cache first{"32K", "2"}, second{"512K", "2"};
  check_equal(found_with("0-3", {first, second, {"32768K", "0-3"}}), uint64_t{32} << 20, "one");
  check_equal(found_with("0-7", {first, second, {"32768K", "0-3"}}), uint64_t{64} << 20, "two");
  check_equal(found_with("0-3", {first, second}), uint64_t{2} << 20, "no third level");
  check_equal(found_with("0-3", {}), uint64_t{0}, "no caches");
  check_equal(found_with("2", {{"32768K", "0-3"}}), uint64_t{32} << 20, "sharers are offline");
  check_equal(last_level_cache_bytes("/nowhere", 0), uint64_t{0}, "no directory");
  check(last_level_cache_bytes() > 0, "this machine");
}

const CaseTable kCases{
    {"cores_lists", lists_of_cores_are_read},
    {"cores_caches", last_level_caches_are_counted_once},
};

}  // namespace
}  // namespace rota::test
