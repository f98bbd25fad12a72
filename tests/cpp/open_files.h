// For cases that leave no descriptor open.
#pragma once

#include <cstdint>
#include <filesystem>
#include <iterator>

namespace rota::test {

// The number of open descriptors of this process.
inline int64_t num_open_files() {
  using std::filesystem::directory_iterator;
  return std::distance(directory_iterator("/proc/self/fd"), directory_iterator());
}

}  // namespace rota::test
