// For cases that leave no descriptor open.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <source_location>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "check.h"

namespace rota::test {

inline int64_t num_open_files() {
  using std::filesystem::directory_iterator;
  return std::distance(directory_iterator("/proc/self/fd"), directory_iterator());
}

// What each of them is open for: a file, or "socket:[7]".
inline std::string names_of_open_files() {
  std::string names;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;  // one that another thread has closed meanwhile has no name
    names += " " + std::filesystem::read_symlink(entry.path(), error).string();
  }
  return names;
}

// Waits for the listener's thread, which closes a connection only after its answer has arrived. One
// count decides: a peer may connect right after it, and be counted by a second one.
inline void check_num_open_files(int64_t expected, std::string_view what,
                                 std::source_location where = std::source_location::current()) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  int64_t num_files = num_open_files();
  while (num_files != expected && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    num_files = num_open_files();
  }
  check_equal(num_files, expected, join(what, " (", names_of_open_files(), ")"), where);
}

}  // namespace rota::test
