// What the kernel says of cores and caches.
#include "base/cores.h"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "grouped_digits.h"
#include "processes.h"

namespace rota::test {
namespace {

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

// What is found for core 2, which has these caches; indices ascend with the levels.
uint64_t found_with(const std::string& online, const std::vector<Cache>& caches) {
  const TemporaryDirectory directory;
  std::ofstream(directory.path() / "online") << online << '\n';
  for (size_t index = 0; index < caches.size(); ++index) {
    const auto cache = directory.path() / "cpu2" / "cache" / join("index", index);
    std::filesystem::create_directories(cache);
    std::ofstream(cache / "size") << caches[index].size << '\n';
    std::ofstream(cache / "shared_cpu_list") << caches[index].sharers << '\n';
  }
  return last_level_cache_bytes(directory.path(), 2);
}

void caches_are_read_whatever_the_locale() {
  group_digits();
  check_equal(found_with("0-3", {{"32768K", "0,2"}}), 64 << 20, "two of four cores");
}

void last_level_caches_are_counted_once() {
  const Cache first{"32K", "2"}, second{"512K", "2"};
  check_equal(found_with("0-3", {first, second, {"32768K", "0-3"}}), 32 << 20, "one");
  check_equal(found_with("0-7", {first, second, {"32768K", "0-3"}}), 64 << 20, "two");
  check_equal(found_with("0-3", {first, second}), 2 << 20, "no third level");
  check_equal(found_with("0-3", {}), 0, "no caches");
  check_equal(found_with("2", {{"32768K", "0-3"}}), 32 << 20, "sharers are offline");
  check_equal(last_level_cache_bytes("/nowhere", 0), 0, "no directory");
  check(last_level_cache_bytes() > 0, "this machine");
}

const CaseTable kCases{
    {"cores_lists", lists_of_cores_are_read},
    {"cores_locale", caches_are_read_whatever_the_locale},
    {"cores_caches", last_level_caches_are_counted_once},
};

}  // namespace
}  // namespace rota::test
